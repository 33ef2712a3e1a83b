"""The host path beside the GDS engine: opened when the first file needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tensorspill.engine.batch import Batch
from tensorspill.engine.engine import Engine
from tensorspill.engine.file import File
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import UnsupportedError
from tensorspill.pool.cuda.streams import Stream

__all__ = ["Fallback"]


class Fallback:
    """Another engine, on the same folder and device, for files that GPUDirect Storage fails on.

    Parameters
    ----------
    make : callable, optional
        Opens the engine. Without it nothing falls back.

    Attributes
    ----------
    files : int
        Files that fell back.
    """

    def __init__(self, make: Callable[[], Engine] | None) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._stream: Stream | None = None
        self.files = 0

    @property
    def is_there(self) -> bool:
        """Whether files may fall back."""
        return self._make is not None

    @property
    def staging_bytes(self) -> int:
        """Memory that the other engine holds."""
        return 0 if self._engine is None else self._engine.statistics().staging_bytes

    def open(self, name: str, mode: str) -> File:
        """Open an existing file in the other engine."""
        return self._opened().open(name, mode)

    def submit(self, batch: Batch) -> Transfer:
        """Start a batch whose memory is ready, of files that `open` returned."""
        engine = self._opened()
        with self._lock:
            if self._stream is None:
                # Nothing is ever put on it, so there is nothing to wait for.
                self._stream = Stream(engine.device.index)
        return engine.submit(batch, stream=self._stream)

    def _opened(self) -> Engine:
        with self._lock:
            if self._engine is None:
                if self._make is None:
                    raise UnsupportedError("There is no host path beside this engine")
                self._engine = self._make()
                self._engine.serve()
            return self._engine

    def close(self) -> None:
        """Close the other engine; a second time does no harm."""
        if self._engine is not None:
            self._engine.close()
