"""Kernels over memory: packing with dtype conversion, and the digest, on GPU and CPU."""
