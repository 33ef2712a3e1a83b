"""Spans as NVTX ranges, which NVIDIA's profilers show beside the GPU's own work."""

from __future__ import annotations

from typing import Any

import torch

from tensorspill.errors import UnsupportedError
from tensorspill.timeline.spans import Kind, Span

__all__ = ["NvtxRanges"]

_cuda: Any = torch.cuda  # not all of its functions have types
_built: Any = torch.backends.cuda.is_built


class NvtxRanges:
    """Marks compute and stalls; transfers have no thread, and are marked by their ends."""

    @classmethod
    def wanted(cls, nvtx: bool | None) -> NvtxRanges | None:
        """Return the listener, or None: by default where CUDA is in use already.

        Raises
        ------
        UnsupportedError
            It is asked for, and this torch has no CUDA.
        """
        if nvtx is None:
            return cls() if _cuda.is_initialized() else None
        if nvtx and not _built():
            raise UnsupportedError("NVTX ranges need a torch with CUDA")
        return cls() if nvtx else None

    def begun(self, kind: Kind, name: str) -> None:
        """Open a range in this thread."""
        _cuda.nvtx.range_push(f"tensorspill {kind}: {name}")

    def ended(self, span: Span) -> None:
        """Close it; a transfer is a mark."""
        if span.kind == "transfer":
            _cuda.nvtx.mark(f"tensorspill {span.name}: {span.nbytes} bytes")
        else:
            _cuda.nvtx.range_pop()
