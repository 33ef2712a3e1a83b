"""What can be done with a checkpoint that exists: list, verify, show, export, compare."""
