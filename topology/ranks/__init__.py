"""Ranks: which process is which, what its launcher says, and the parallel layout."""
