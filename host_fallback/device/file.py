"""A file of the engine for CUDA tensors on the host path."""

from __future__ import annotations

from tensorspill.engine.file import File
from tensorspill.engine.ledger import Ledger
from tensorspill.host_fallback.file import AioFile

__all__ = ["StagedFile"]


class StagedFile(File):
    """A file whose bytes go through staging blocks, from and to GPU memory at any address.

    Attributes
    ----------
    inner : AioFile
        The same file, opened by the AIO engine.
    """

    copies_cheaply = True

    def __init__(self, inner: AioFile, ledger: Ledger) -> None:
        super().__init__(inner.path, inner.fd, inner.writable, ledger, inner.close)
        self.inner = inner
        self.granule = inner.granule
