"""Who writes what of a checkpoint, on many ranks, and what happens when one of them fails."""
