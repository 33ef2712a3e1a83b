"""Profiling: how fast a drive is, which path bytes took, and what to set."""
