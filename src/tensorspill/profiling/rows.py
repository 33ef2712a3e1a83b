"""Rows: one for each point that was measured, as JSON lines and as CSV.

A results file is JSON lines. The first says which version of the form follows, each row has exactly
the columns of `Row`, and the line after a row may hold what each of its rounds gave. Reading is
tolerant: of files that were cut short, that are older or newer, or that were put together.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.profiling.points import size_text

__all__ = [
    "COLUMNS",
    "NOT_MEASURED",
    "Results",
    "Row",
    "header_line",
    "lines_of",
    "read_results",
    "to_csv",
]

VERSION = 1
_FORM = "tensorspill-rows"
_ROUNDS = "round_gbps"

#: How `Row.path_taken` begins where there is no figure; the reason follows.
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point, measured. What is None was not measured or is not known.

    Attributes
    ----------
    ts : str
        When its first round began: ISO 8601, UTC.
    host, commit : str
        The machine's name; which tensorspill.
    engine : str
        "aio" or "gds"; or the program it is compared with: "fio", "gdsio", "nvbandwidth".
    path_taken : str
        Which way the bytes went, such as "direct", or "direct 97 %, edge 3 %"; or "not measured"
        and why.
    direction : {"read", "write"}
        Of the drive; of nvbandwidth "read" is from host to GPU.
    gpu : str or None
        The GPU whose memory was used; None for host memory.
    device, fs : str or None
        The drive or stack below, and the file system's type.
    numa : int or None
        The NUMA node that the engine's threads ran on, if one was given.
    block_bytes, depth, threads : int or None
        Of the engine: bytes of an operation, operations under way for each thread, threads.
    total_bytes : int or None
        Bytes of one round.
    rounds : int
        How often they were moved.
    gbps_first_done, gbps_last_done : float or None
        Rate in GB/s (decimal); medians over the rounds. A round is asked for as one transfer for
        each thread, or for each tensor if these are fewer: the rate until the first of them was
        done, and until the last was. The same with one transfer.
    gbps_stdev : float or None
        Standard deviation of the rounds' `gbps_last_done`.
    lat_us_p50, lat_us_p99, lat_us_p999, lat_us_max : float or None
        Latency of the operations of all rounds, in microseconds. Percentiles are the upper ends of
        a histogram's steps, at most an eighth too large.
    cpu_pct : float or None
        CPU time of the process during the rounds, in per cent of one CPU.
    pct_of_ceiling, ceiling_name : float, str or None
        `gbps_last_done` in per cent of the tightest of the known limits, and which that is.
    o_direct : bool or None
        Whether all bytes went past the page cache.
    cache_dropped : bool or None
        Whether none of the file was in the page cache before each round. What the drive or a
        hypervisor keeps in memory of its own, nobody can drop.
    fsync : bool or None
        Whether an fsync was part of the time.
    verified : bool or None
        Whether the bytes were compared: of reads all of every round; of writes some of every round,
        read back another way, and all of the last.
    cmd : str
        The command that measures this point.
    """

    ts: str
    host: str
    commit: str
    engine: str
    path_taken: str
    direction: str
    gpu: str | None = None
    device: str | None = None
    fs: str | None = None
    numa: int | None = None
    block_bytes: int | None = None
    depth: int | None = None
    threads: int | None = None
    total_bytes: int | None = None
    rounds: int = 0
    gbps_first_done: float | None = None
    gbps_last_done: float | None = None
    gbps_stdev: float | None = None
    lat_us_p50: float | None = None
    lat_us_p99: float | None = None
    lat_us_p999: float | None = None
    lat_us_max: float | None = None
    cpu_pct: float | None = None
    pct_of_ceiling: float | None = None
    ceiling_name: str | None = None
    o_direct: bool | None = None
    cache_dropped: bool | None = None
    fsync: bool | None = None
    verified: bool | None = None
    cmd: str = ""

    @property
    def measured(self) -> bool:
        """Whether there is a figure."""
        return self.gbps_last_done is not None

    def argument(self, name: str) -> str:
        """Return the value of an argument such as "--memory" in `cmd`, or an empty string."""
        words = self.cmd.split()
        return words[words.index(name) + 1] if name in words[:-1] else ""

    @property
    def label(self) -> str:
        """The point in a few words, for people: without direction and engine."""
        words = [size_text(self.block_bytes)] if self.block_bytes else []
        words += [f"x {self.depth}"] if self.depth else []
        words += [f"x {self.threads} threads"] if (self.threads or 1) > 1 else []
        tensor = self.argument("--tensor")
        words += [f"in tensors of {tensor}"] if tensor else []
        words += [self.gpu or self.argument("--memory")]
        return " ".join(filter(None, words))

    def to_json(self) -> dict[str, Any]:
        """Return the columns as JSON values, in order."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Row:
        """Return the row of a JSON object: unknown keys are dropped, missing ones are not known.

        Raises
        ------
        UnsupportedError
            It lacks what every row has, or a value is of another type.
        """
        found = {}
        for name, kinds in _KINDS.items():
            item = value.get(name)
            if item is not None:
                found[name] = _checked(name, item, kinds)
            elif name in _REQUIRED:
                raise UnsupportedError(f"A row without {name}")
        return cls(**found)


#: The columns, in order.
COLUMNS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Row))

_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}
_KINDS = {f.name: _TYPES[str(f.type).removesuffix(" | None")] for f in dataclasses.fields(Row)}
_REQUIRED = ("engine", "direction")
_KINDS_OF_OLD = ("ts", "host", "commit", "path_taken")


def _checked(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
    if wrong or (isinstance(value, float) and not math.isfinite(value)):
        raise UnsupportedError(f"A row's {name} can't be {value!r}")
    return float(value) if float in kinds else value


@dataclass(frozen=True, slots=True)
class Results:
    """What files of results hold.

    Attributes
    ----------
    rows : tuple of Row
    rounds : tuple of tuple of float
        For each row the GB/s of its rounds, in order; empty where the file does not say.
    notes : tuple of str
        What could not be read, and why.
    """

    rows: tuple[Row, ...] = ()
    rounds: tuple[tuple[float, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[Row, ...]:
        """The rows that have figures."""
        return tuple(row for row in self.rows if row.measured)

    def __add__(self, other: Results) -> Results:
        return Results(self.rows + other.rows, self.rounds + other.rounds, self.notes + other.notes)


def header_line() -> str:
    """Return the first line of a results file."""
    return json.dumps({"form": _FORM, "version": VERSION}) + "\n"


def lines_of(row: Row, rounds: Iterable[float] = ()) -> str:
    """Return the lines of a row and of its rounds."""
    text = json.dumps(row.to_json()) + "\n"
    figures = [round(gbps, 6) for gbps in rounds]
    return text + (json.dumps({_ROUNDS: figures}) + "\n" if figures else "")


def read_results(path: str | os.PathLike[str]) -> Results:
    """Read a results file: JSON lines, or CSV.

    Raises
    ------
    BrokenError
        The file can't be read.
    UnsupportedError
        It is no results file: not one line of it is a row or a header.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't read the results", path=name) from error
    is_csv = text.startswith(f"{COLUMNS[0]},")
    reading = _Reading(name)
    if is_csv:
        reading.take_csv(text)
    else:
        reading.take_lines(text)
    return reading.results(bool(text.strip()))


class _Reading:
    """Collects rows, and says what is wrong with the rest."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows: list[Row] = []
        self._rounds: list[tuple[float, ...]] = []
        self._notes: list[str] = []
        self._known = False

    def results(self, content: bool) -> Results:
        if content and not self._rows and not self._known:
            raise UnsupportedError("No results of tensorspill", path=self._name)
        return Results(tuple(self._rows), tuple(self._rounds), tuple(self._notes))

    def take_lines(self, text: str) -> None:
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                # Every line is ended when it is complete.
                cut = number == len(lines)
                self._note(number, "cut short" if cut else "no JSON")
                continue
            self._take(number, value)

    def _take(self, number: int, value: Any) -> None:
        if not isinstance(value, dict):
            self._note(number, "no row")
        elif value.get("form") == _FORM:
            self._known = True
            if value.get("version") != VERSION:
                said = f"form {value.get('version')} is not {VERSION}; read as far as known"
                self._note(number, said)
        elif _ROUNDS in value and self._rows:
            figures = value[_ROUNDS]
            if isinstance(figures, list) and all(_is_rate(each) for each in figures):
                self._rounds[-1] = tuple(map(float, figures))
        else:
            self._add(number, value)

    def take_csv(self, text: str) -> None:
        reader = csv.DictReader(io.StringIO(text))
        lines = text.count("\n")
        for record in reader:
            if reader.line_num > lines or None in record.values():
                self._note(reader.line_num, "cut short")
                continue
            try:
                value = {name: _from_csv(name, cell) for name, cell in record.items() if cell}
            except ValueError:
                self._note(reader.line_num, "no row")
                continue
            self._add(reader.line_num, value)
        self._known = True

    def _add(self, number: int, value: dict[str, Any]) -> None:
        # What every row of today says, and an older one need not.
        for name in _KINDS_OF_OLD:
            value.setdefault(name, "")
        try:
            self._rows.append(Row.from_json(value))
        except UnsupportedError as error:
            self._note(number, error.message)
        else:
            self._rounds.append(())

    def _note(self, number: int, what: str) -> None:
        self._notes.append(f"{self._name}, line {number}: {what}")


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def to_csv(rows: Iterable[Row]) -> str:
    """Return rows as CSV with a line of names; None is empty, booleans are true or false."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(_to_csv(value) for value in row.to_json().values())
    return file.getvalue()


def _to_csv(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else value


def _from_csv(name: str, cell: str) -> Any:
    kinds = _KINDS.get(name, (str,))
    if bool in kinds:
        return {"true": True, "false": False}[cell.lower()] if cell else None
    return kinds[-1](cell)
