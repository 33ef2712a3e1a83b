"""Models larger than memory: `offload` and `init`."""
