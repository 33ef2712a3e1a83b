"""Benchmarks: what the host path reaches on this machine, against fio and against other ways.

Run from the root of the repository:

- ``python -m benchmarks.host_path``: every rate and cost that the host path is held to.
- ``python -m benchmarks.profiling``: whether the figures of bench and tune can be trusted.
- ``python -m benchmarks.pack_threshold``: from which size on packing and staging cost more than
  they save, and how much staging is enough.
"""
