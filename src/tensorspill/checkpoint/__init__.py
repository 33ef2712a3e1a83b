"""Checkpoints: every byte once, by the right writers, and never half-committed."""
