"""Pictures of measurements: the same functions for notebooks, the command line and reports."""
