"""CUDA memory through cuda-python and CuPy: contexts, allocation, page-locking, registration."""
