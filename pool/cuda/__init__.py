"""CUDA memory through cuda-python and CuPy: contexts, allocation, page-locking, registration.

The only place that talks to the CUDA driver. Importing any module of it loads no driver, and on a
machine without one every call says why in a `tensorspill.errors.UnsupportedError`.
"""
