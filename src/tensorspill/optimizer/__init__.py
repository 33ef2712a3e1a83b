"""Optimizer states that live on the drive."""
