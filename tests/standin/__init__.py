"""Stand-ins for the CUDA driver and cuFile, so that the real libraries run without a GPU.

``libcuda.so.1`` works over host memory: device memory faults when the host touches it, streams are
threads, contexts are counted. ``libcufile.so.0`` moves bytes between that memory and files, with
failures, short counts and delays where a test wants them. The real kvikio, cuda-python and
numba-cuda run on them, unchanged; kernels do not.

=============  ====================================================================================
`build`        compiles them, once for each state of the sources, with gcc
`lanes`        the ways to run a process on them, and why one is not possible here
`child`        runs Python, or pytest, in a lane, with a time limit
`control`      in such a process: rules for failures, counters, holding a stream
`arrays`       in such a process: device memory with ``__cuda_array_interface__``
=============  ====================================================================================

Tests that need a lane are in a folder that is collected only there (see ``conftest.py`` here), and
a test outside starts them: ``run_pytest(lane("cufile"), "tests/standin/inside")``.

The C sources say what they stand in for, and which variables set them up. What they can't show:
speed, DMA alignment, BAR1, peer-to-peer, kernels.
"""
