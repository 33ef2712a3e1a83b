"""Rows of the result: what was measured, against what, and whether it is enough."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tensorspill.profiling.rounds import Quantity, Results, Spread, gbps, noise_floor

__all__ = ["Bound", "Compared", "Row", "Verdict", "at_least", "at_most", "figure", "judge"]


class Verdict(StrEnum):
    """Whether a bound is kept."""

    MET = "met"
    #: Not met, but the two differ by less than two runs of the same case do.
    EQUAL = "equal within noise"
    NOT_MET = "NOT MET"
    NOT_MEASURED = "not measured"
    #: There is no bound.
    REPORTED = "-"


@dataclass(frozen=True, slots=True)
class Bound:
    """What a ratio, or a figure without a reference, must reach."""

    value: float
    least: bool

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.value:g}"

    def holds(self, value: float) -> bool:
        """Whether a value keeps the bound."""
        return value >= self.value if self.least else value <= self.value


def at_least(value: float) -> Bound:
    """Return the bound for what should be large."""
    return Bound(value, True)


def at_most(value: float) -> Bound:
    """Return the bound for what should be small."""
    return Bound(value, False)


def judge(value: float | None, bound: Bound | None, noise: float | None = None) -> Verdict:
    """Return the verdict on a median ratio, or on a figure.

    Parameters
    ----------
    value : float or None
        None if it could not be measured.
    bound : Bound or None
    noise : float or None
        A difference from the reference inside it counts as equal; that helps only where being
        equal is enough.
    """
    if value is None:
        return Verdict.NOT_MEASURED
    if bound is None:
        return Verdict.REPORTED
    if bound.holds(value):
        return Verdict.MET
    if noise is not None and bound.holds(1.0) and abs(value - 1) <= noise:
        return Verdict.EQUAL
    return Verdict.NOT_MET


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result.

    Attributes
    ----------
    suite, case : str
    ours, theirs : float or None
        Medians, in `unit`; None if not measured.
    unit : str
    reference : str
        What `theirs` is.
    ratio : Spread or None
        Of ours over theirs, in pairs of the same round.
    bound : Bound or None
        On the median of the ratio, or on `ours` if there is no reference.
    noise : float or None
        See `noise_floor`.
    verdict : Verdict
    note : str
    """

    suite: str
    case: str
    ours: float | None
    unit: str
    reference: str = ""
    theirs: float | None = None
    ratio: Spread | None = None
    bound: Bound | None = None
    noise: float | None = None
    verdict: Verdict = Verdict.REPORTED
    note: str = ""

    def record(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {**asdict(self), "bound": None if self.bound is None else str(self.bound)}


def figure(
    suite: str,
    case: str,
    value: float | None,
    unit: str,
    bound: Bound | None = None,
    note: str = "",
) -> Row:
    """Return the row of a figure that has no reference."""
    return Row(suite, case, value, unit, bound=bound, verdict=judge(value, bound), note=note)


@dataclass(frozen=True, slots=True)
class Compared:
    """Makes rows of one suite's results.

    Attributes
    ----------
    suite : str
    results : Results
    unit : str
        Of `quantity`.
    quantity : callable, optional
        What is compared; the rate if not given.
    twins : tuple of str, optional
        Two identical cases, whose ratio gives the noise floor.
    """

    suite: str
    results: Results
    unit: str = "GB/s"
    quantity: Quantity = gbps
    twins: tuple[str, str] | None = None

    @property
    def noise(self) -> float | None:
        """The noise floor of this quantity."""
        return noise_floor(self.results.ratios(*self.twins, self.quantity)) if self.twins else None

    def row(
        self,
        case: str,
        reference: str,
        bound: Bound | None = None,
        note: str = "",
        name: str | None = None,
    ) -> Row:
        """Compare a case with a reference."""
        ratio = self.results.spread_of_ratios(case, reference, self.quantity)
        noise = self.noise
        return Row(
            suite=self.suite,
            case=name or case,
            ours=self.results.median(case, self.quantity),
            unit=self.unit,
            reference=reference,
            theirs=self.results.median(reference, self.quantity),
            ratio=ratio,
            bound=bound,
            noise=noise,
            verdict=judge(ratio.median if ratio else None, bound, noise),
            note=note,
        )
