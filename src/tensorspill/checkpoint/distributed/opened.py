"""Engines for one save or load, whose end nobody has to wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tensorspill.checkpoint.files.engines import Engines

__all__ = ["opened_engines"]


@contextmanager
def opened_engines(folder: str, backend: str) -> Iterator[Engines]:
    """Open engines, and close them in a thread of their own.

    Taking an AIO context down takes the kernel tens of milliseconds.
    """
    engines = Engines(folder, backend)
    try:
        yield engines
    finally:
        threading.Thread(target=engines.close, name="tensorspill-close").start()
