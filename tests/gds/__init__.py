"""Tests of the GDS engine: plain ones here, those that need a CUDA driver in `inside`."""
