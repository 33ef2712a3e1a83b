"""Watching all engines of a process: who watches is told of every transfer that ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tensorspill.engine.statistics import PathStatistics

__all__ = ["Ended", "tell", "watching"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer that has ended.

    Attributes
    ----------
    folder : str
        Of its engine.
    begin, end : float
        Seconds, of `time.perf_counter`.
    bytes_read, bytes_written : int
        0 of one that failed.
    failed : bool
        Or was cancelled.
    by_path : mapping of str to PathStatistics
        What went each path, of one that failed as well.
    """

    folder: str
    begin: float
    end: float
    bytes_read: int
    bytes_written: int
    failed: bool
    by_path: Mapping[str, PathStatistics]


_watchers: tuple[Callable[[Ended], None], ...] = ()
_changing = threading.Lock()


@contextmanager
def watching(watcher: Callable[[Ended], None]) -> Iterator[None]:
    """Return a context in which `watcher` is told of the transfers of all engines that end.

    It is called in the engines' threads, which it must not keep waiting.
    """
    global _watchers
    with _changing:
        _watchers = (*_watchers, watcher)
    try:
        yield
    finally:
        with _changing:
            known = list(_watchers)
            known.remove(watcher)
            _watchers = tuple(known)


def tell(make: Callable[[], Ended]) -> None:
    """Tell whoever watches; costs next to nothing while nobody does."""
    if not _watchers:
        return
    ended = make()
    for watcher in _watchers:
        try:
            watcher(ended)
        except Exception:
            # A transfer must end, whatever becomes of who looks on.
            log.exception("A watcher of transfers failed")
