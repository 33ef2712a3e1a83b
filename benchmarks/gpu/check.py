"""What every part is given, and what it gives: rows, or a reason why there are none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import Row, Verdict
from tensorspill.profiling.rounds import Case, Results, run_rounds

__all__ = ["Check", "NotMeasured", "Outcome", "Part", "attempt", "cut_rounds"]

MIB = 1 << 20


class NotMeasured(Exception):  # noqa: N818 (no error: a piece is missing)
    """This can't be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """Where and how much to measure.

    Attributes
    ----------
    folder : Path
        An empty folder on the drive to be measured.
    device : torch.device
        The GPU; a rehearsal uses the CPU.
    deadline : float
        When all has to be over, by `time.monotonic`.
    rounds : int
        At most.
    scale : int
        What sizes are divided by; 1 but for rehearsals.
    gds : Path or None
        A folder on a drive with GPUDirect Storage.
    chance : random.Random
        For the order of cases.
    """

    folder: Path
    device: torch.device
    deadline: float
    rounds: int = 5
    scale: int = 1
    gds: Path | None = None
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def size(self, nbytes: int) -> int:
        """Return a size, smaller in a rehearsal; a multiple of 4096."""
        return max(4096, nbytes // self.scale // 4096 * 4096)

    def synchronize(self) -> None:
        """Wait until the GPU has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part.

    Attributes
    ----------
    rows : list of Row
    notes : list of str
    why : str
        Why nothing was measured; empty if something was.
    error : str
        What went wrong; empty if nothing did.
    seconds : float
    """

    rows: list[Row]
    notes: list[str]
    why: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it went wrong, or a bound is not kept."""
        return bool(self.error) or any(row.verdict is Verdict.NOT_MET for row in self.rows)

    @property
    def complete(self) -> bool:
        """Whether all of it was measured."""
        return not self.why and all(row.verdict is not Verdict.NOT_MEASURED for row in self.rows)

    def record(self) -> dict[str, Any]:
        """Return the outcome for JSON."""
        return {
            "rows": [row.record() for row in self.rows],
            "notes": self.notes,
            "not measured": self.why,
            "error": self.error,
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, slots=True)
class Part:
    """Something to measure.

    Attributes
    ----------
    name : str
    run : callable
        Returns rows and notes, or raises `NotMeasured`.
    least : float
        Seconds without which it is not begun.
    needs : tuple of callable
        Each returns why something that it needs is missing, or None.
    """

    name: str
    run: Callable[[Check], tuple[list[Row], list[str]]]
    least: float = 5.0
    needs: tuple[Callable[[Check], str | None], ...] = ()


def attempt(part: Part, check: Check) -> Outcome:
    """Run a part; whatever goes wrong in it is what came of it."""
    begun = time.monotonic()
    for need in part.needs:
        if why := need(check):
            return Outcome([], [], why=why)
    if check.left < part.least:
        return Outcome([], [], why=f"only {check.left:.0f} s were left, it takes {part.least:.0f}")
    try:
        rows, notes = part.run(check)
    except NotMeasured as reason:
        return Outcome([], [], why=str(reason), seconds=time.monotonic() - begun)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return Outcome([], [], error=said, seconds=time.monotonic() - begun)
    return Outcome(rows, notes, seconds=time.monotonic() - begun)


def cut_rounds(cases: Mapping[str, Case], check: Check, seconds: float) -> Results:
    """Run rounds of cases, as many as there is time for, at least one."""
    end = time.monotonic() + min(seconds, max(check.left - 5.0, 0.0))
    samples: dict[str, list[Any]] = {name: [] for name in cases}
    for _ in range(check.rounds):
        begun = time.monotonic()
        for name, found in run_rounds(cases, 1, check.chance).samples.items():
            samples[name] += found
        if time.monotonic() + (time.monotonic() - begun) > end:
            break
    return Results(samples)
