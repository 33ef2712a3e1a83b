"""In notebooks: ``%spill_stats``, which says what a cell moved by which path, and a progress bar.

``%load_ext tensorspill`` gives the first; `progress` is a context like that of the command line.
"""

from __future__ import annotations

import html
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tensorspill.engine.latencies import Latencies
from tensorspill.engine.statistics import PathStatistics
from tensorspill.engine.watching import Ended, watching
from tensorspill.errors import UnsupportedError
from tensorspill.pool.sizes import format_bytes

__all__ = ["Moved", "load", "moved", "progress"]

_COLUMNS = ("folder", "path", "bytes", "operations", "p50", "p99", "why")


@dataclass(slots=True, eq=False)
class Moved:
    """What all engines of the process moved while it was watched.

    Attributes
    ----------
    by_path : dict of (str, str) to PathStatistics
        By folder and path.
    transfers, failed : int
        That ended; of these failed or cancelled.
    bytes_read, bytes_written : int
    seconds : float
        For which it was watched.
    """

    by_path: dict[tuple[str, str], PathStatistics] = field(default_factory=dict)
    transfers: int = 0
    failed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    _begin: float = field(default_factory=time.perf_counter)
    _times: list[tuple[float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, ended: Ended) -> None:
        """Count a transfer."""
        with self._lock:
            self.transfers += 1
            self.failed += ended.failed
            self.bytes_read += ended.bytes_read
            self.bytes_written += ended.bytes_written
            self._times.append((max(ended.begin, self._begin), ended.end))
            for path, moved in ended.by_path.items():
                key = ended.folder, path
                self.by_path[key] = self.by_path.get(key, PathStatistics()) + moved

    def stop(self) -> None:
        """Note that it is not watched any more."""
        self.seconds = time.perf_counter() - self._begin

    @property
    def busy(self) -> float:
        """Seconds in which at least one transfer was under way."""
        total, until = 0.0, 0.0
        with self._lock:
            for begin, end in sorted(self._times):
                total += max(0.0, end - max(begin, until))
                until = max(until, end)
        return total

    @property
    def latencies(self) -> dict[str, Latencies]:
        """Latencies of the operations by path, over all folders, where engines time them."""
        found: dict[str, Latencies] = {}
        for (_, path), of_path in self.by_path.items():
            if of_path.latencies.count:
                found[path] = found.get(path, Latencies()) + of_path.latencies
        return found

    def __str__(self) -> str:
        lines = [self._summary()]
        rows = [_COLUMNS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if len(rows) > 1:
            lines += [
                "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
                for row in rows
            ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the same as a table, for notebooks."""
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._rows()
        )
        table = f"<table><tr>{head}</tr>{body}</table>" if body else ""
        return f"<p>{html.escape(self._summary())}</p>{table}"

    def _summary(self) -> str:
        if not self.transfers:
            return f"No transfer ended in {self.seconds:.2f} s"
        nbytes, busy = self.bytes_read + self.bytes_written, self.busy
        rate = f", {nbytes / busy / 1e9:.2f} GB/s meanwhile" if busy > 0 else ""
        failed = f", {self.failed} of them failed or cancelled" if self.failed else ""
        return (
            f"{format_bytes(self.bytes_read)} read and {format_bytes(self.bytes_written)} written "
            f"in {self.transfers} transfers{failed}; under way for {busy:.2f} of "
            f"{self.seconds:.2f} s{rate}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                folder,
                path,
                format_bytes(of_path.nbytes),
                f"{of_path.operations:,}" if of_path.operations else "",
                _microseconds(of_path.latencies, 50),
                _microseconds(of_path.latencies, 99),
                of_path.why,
            )
            for (folder, path), of_path in sorted(self.by_path.items())
        ]


def _microseconds(latencies: Latencies, share: float) -> str:
    return f"{1e6 * latencies.percentile(share):,.0f} µs" if latencies.count else ""


@contextmanager
def moved() -> Iterator[Moved]:
    """Return a context in which the transfers of all engines of this process are counted."""
    counted = Moved()
    try:
        with watching(counted.add):
            yield counted
    finally:
        counted.stop()


@contextmanager
def progress(**options: Any) -> Iterator[Callable[[float, float, str], None]]:
    """Show a progress bar, in a notebook as one of its own, in a terminal as text.

    Parameters
    ----------
    **options
        Of ``tqdm.auto.tqdm``, such as ``disable``.

    Returns
    -------
    callable
        To be told what is done, of how much, and what comes next.

    Raises
    ------
    UnsupportedError
        tqdm is not installed.
    """
    try:
        tqdm = importlib.import_module("tqdm.auto").tqdm
    except ImportError as error:
        raise UnsupportedError(
            f"A progress bar needs tqdm: {error}", remedy="pip install tensorspill[notebook]"
        ) from error
    form = "{l_bar}{bar}| {elapsed}, {remaining} left"
    with tqdm(total=1.0, bar_format=form, **options) as bar:

        def tick(done: float, total: float, text: str) -> None:
            bar.total = max(total, done, 1e-9)
            bar.set_description(text, refresh=False)
            bar.n = done
            bar.refresh()

        yield tick


class _Cell:
    """``%spill_stats``: counts from where it stands to the end of its cell."""

    def __init__(self) -> None:
        self._open: ExitStack | None = None
        self._counted: Moved | None = None

    def begin(self, line: str = "") -> None:
        """Count from here on."""
        if line.strip():
            raise UnsupportedError("%spill_stats takes no arguments: it is for the whole cell")
        if self._open is None:
            self._open = ExitStack()
            self._counted = self._open.enter_context(moved())

    def end(self, _result: Any = None) -> None:
        """Show what was counted; called after every cell, whether it raised or not."""
        counted, held = self._counted, self._open
        if counted is None or held is None:
            return
        self._counted = self._open = None
        held.close()
        importlib.import_module("IPython.display").display(counted)


def load(shell: Any) -> None:
    """Give a shell of IPython's the magic ``%spill_stats``; a second time does no harm."""
    if "spill_stats" in shell.magics_manager.magics["line"]:
        return
    cell = _Cell()
    shell.register_magic_function(cell.begin, "line", "spill_stats")
    shell.events.register("post_run_cell", cell.end)
