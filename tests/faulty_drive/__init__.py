"""The process of `tests.faults.fuse`; a package of its own so that it starts without torch."""
