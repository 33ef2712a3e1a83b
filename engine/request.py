"""A request: which bytes of memory go to, or come from, which bytes of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorspill.engine.file import File

__all__ = ["Request"]


@dataclass(slots=True, eq=False)
class Request:
    """One contiguous move between memory and a file.

    Parameters
    ----------
    buffer : torch.Tensor, tensorspill.pool.Buffer, numpy.ndarray or buffer-protocol object
        The memory, contiguous. The destination of a read must be writable. Owned by the transfer
        from `submit` until the transfer ends.
    file : File
        Opened by the engine that the request is submitted to.
    offset : int
        Where in the file, in bytes; any value.
    nbytes : int, optional
        How many bytes, from the start of the buffer; all of them if not given.
    write : bool
        Memory to file if true, file to memory if not.
    """

    buffer: Any
    file: File
    offset: int = 0
    nbytes: int | None = None
    write: bool = False
