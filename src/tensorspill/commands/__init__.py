"""Commands of the command line: for each one a module that is cheap to import, and its output."""
