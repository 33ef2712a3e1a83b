"""CUDA memory on the host path: staging through page-locked blocks, disk and PCIe overlapped."""
