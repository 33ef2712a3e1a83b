"""Kernels over memory: packing with dtype conversion, and the digest, on GPU and CPU.

Each has one public function, which picks by device: Triton for GPU memory, torch where Triton is
missing or fails, and on the CPU what was measured to be fastest there: numba for digests, torch for
conversions.

========================  =====================================================
`casting.cast`            many tensors into many others, with dtype conversion
`packing.pack`, `unpack`  many tensors into one slab, and back
`digesting.begin_digests`  the pool's digest of many tensors, on their device
========================  =====================================================

Importing this starts nothing: Triton is imported when GPU memory is first touched.
"""
