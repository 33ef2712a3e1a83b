"""The engines that move a checkpoint: one for each device that has tensors, opened when needed."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any, Self

import torch

from tensorspill.engine.engine import Engine
from tensorspill.errors import ClosedError, UnsupportedError
from tensorspill.opening import open_engine

__all__ = ["Engines"]


class Engines:
    """Engines for one folder.

    Parameters
    ----------
    folder : str or path
        Must exist.
    backend : str
        See `tensorspill.open_engine`.
    **options
        Of the engines.
    """

    def __init__(
        self, folder: str | os.PathLike[str], backend: str = "auto", **options: Any
    ) -> None:
        self._folder = folder
        self._backend = backend
        self._options = options
        self._lock = threading.Lock()
        self._engines: dict[torch.device, Engine | None] = {}
        self._closed = False
        # Host memory always moves through the host path.
        host = "aio" if backend == "gds" else backend
        self.host = open_engine(folder, "cpu", host, **options)

    @property
    def folder(self) -> str:
        """Absolute path of the folder."""
        return self.host.folder

    def direct(self, device: torch.device) -> Engine | None:
        """Return an engine that moves a device's memory itself; None if it has to be copied."""
        if device.type == "cpu":
            return self.host
        with self._lock:
            if self._closed:
                raise ClosedError("The engines are closed", path=self.folder)
            if device not in self._engines:
                self._engines[device] = self._open(device)
            return self._engines[device]

    def _open(self, device: torch.device) -> Engine | None:
        try:
            engine = open_engine(self._folder, device, self._backend, **self._options)
        except UnsupportedError:
            return None
        if engine.name == "gds":
            return engine
        # A host engine would copy as well, in memory beyond the staging budget.
        engine.close()
        return None

    def close(self) -> None:
        """Close all; a second time does no harm."""
        with self._lock:
            self._closed = True
            engines = [engine for engine in self._engines.values() if engine is not None]
        for engine in engines:
            engine.close()
        self.host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
