"""Writing one file of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensorspill.checkpoint.files.chunks import Chunk, ObjectChunk
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.records import Written
from tensorspill.engine.engine import Engine
from tensorspill.pool.buffer_pool import BufferPool

__all__ = ["write_file"]


def write_file(
    folder: str,
    name: str,
    chunks: Sequence[Chunk],
    objects: Sequence[ObjectChunk] = (),
    *,
    engine: Engine | Engines,
    staging: BufferPool,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Write a safetensors file; it is durable when this returns.

    Parameters
    ----------
    folder : str
        That of a pending checkpoint, or any other; must exist, in or below the engine's folder.
    name : str
        Of the new file: letters, digits, ``_``, ``-`` and ``.``, with the end ``.safetensors``.
    chunks : sequence of Chunk
    objects : sequence of ObjectChunk
    engine : Engine or Engines
        An engine for host memory, or the engines of several devices.
    staging : BufferPool
        For content that can't move from where it is: other strides, other devices.
    progress : callable, optional
        Called in this thread with the bytes written so far, as blocks complete.

    Raises
    ------
    SpillError
        What went wrong; the file is left as it is, to be swept with its folder.
    """
    raise NotImplementedError
