"""Sweeps: every point of a grid, into a file that an interrupted sweep goes on with."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.profiling.points import Point
from tensorspill.profiling.rows import Row, header_line, lines_of, read_results, to_csv

__all__ = ["ResultsFile", "grid", "write_csv"]

MIB = 1 << 20
#: Of a results file that is another kind of file, nothing may be lost.
_LOOK = 1 << 16


def grid(
    directions: Iterable[str], total_bytes: int, **columns: Sequence[Any]
) -> tuple[Point, ...]:
    """Return every combination of the values given for a point's fields, each once.

    Raises
    ------
    UnsupportedError
        A value is out of range.
    """
    names = list(columns)
    found = [
        Point(direction=direction, total_bytes=total_bytes, **dict(zip(names, values, strict=True)))
        for values in itertools.product(*columns.values())
        for direction in directions
    ]
    return tuple(dict.fromkeys(found))


class ResultsFile:
    """A file that rows are added to, one by one; each is on the drive when `add` returns.

    Parameters
    ----------
    path : path-like
        Made if missing. A last line that was cut short, as when the machine went down, is removed.

    Attributes
    ----------
    rows : tuple of Row
        What it held when it was opened.

    Raises
    ------
    UnsupportedError
        The file holds something else than results as JSON lines.
    BrokenError
        It can't be read or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self.rows: tuple[Row, ...] = ()
        held = os.path.exists(self.path) and os.path.getsize(self.path) > 0
        if held:
            self.rows = read_results(self.path).rows
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BrokenError.from_oserror(
                error, "Can't write the results", path=self.path
            ) from error
        self._file = open(fd, "r+b", buffering=0)  # noqa: SIM115
        try:
            if held:
                self._cut_last_line()
            else:
                self._write(header_line())
        except BaseException:
            self._file.close()
            raise

    def add(self, row: Row, rounds: Iterable[float] = ()) -> None:
        """Add a row and the GB/s of its rounds.

        Raises
        ------
        BrokenError
            It can't be written; what was there is as it was.
        """
        self._write(lines_of(row, rounds))

    def has(self, command: str) -> bool:
        """Whether a measured row of this command was there when the file was opened."""
        return any(row.cmd == command and row.measured for row in self.rows)

    def _write(self, text: str) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            left = memoryview(text.encode())
            while left:
                left = left[self._file.write(left) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            raise BrokenError.from_oserror(
                error, "Can't write the results", path=self.path
            ) from error

    def _cut_last_line(self) -> None:
        """Remove a line without an end, which the next row would be glued to."""
        size = self._file.seek(0, os.SEEK_END)
        begin = max(0, size - _LOOK)
        self._file.seek(begin)
        tail = self._file.read(size - begin)
        if tail.endswith(b"\n"):
            return
        kept = tail.rfind(b"\n") + 1
        last = tail[kept:]
        with suppress(ValueError):
            json.loads(last)
            # Complete but for its end, as editors leave it.
            self._file.write(b"\n")
            return
        if kept == 0:
            raise UnsupportedError("No results of tensorspill: no line has an end", path=self.path)
        self._file.truncate(begin + kept)

    def close(self) -> None:
        """Close the file; a second time does no harm."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_csv(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write rows as CSV; the file is replaced as a whole.

    Raises
    ------
    BrokenError
        It can't be written; what was there is as it was.
    """
    name = os.path.abspath(path)
    made = f"{name}.{os.getpid()}.part"
    try:
        with open(made, "x") as file:
            file.write(to_csv(rows))
        os.replace(made, name)
    except OSError as error:
        with suppress(OSError):
            os.unlink(made)
        raise BrokenError.from_oserror(error, "Can't write the CSV", path=name) from error
