"""Panel E: what happened at the same time in a step of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorspill.pool.sizes import format_bytes
from tensorspill.profiling.pictures.drawing import (
    INK,
    note_below,
    painting,
    say_empty,
    title,
)
from tensorspill.timeline import Span, StepRecord, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["overlap"]

#: Colour and hatch; in grey they are dark, middle and light.
_LOOKS = {
    "compute": ("#1e3a8a", ""),
    "waiting": ("#f59e0b", "xxxx"),
    "read": ("#7dd3fc", "////"),
    "write": ("#d1d5db", "\\\\\\\\"),
}
#: Transfers under way together that are drawn beside each other; more share the last place.
_DEEP = 6


def overlap(timeline: Timeline, axes: Axes | None = None, *, step: int | None = None) -> Figure:
    """Draw compute, waiting and transfers of one step against time.

    Parameters
    ----------
    timeline : Timeline
        What `tensorspill.timeline.recording` recorded.
    axes : matplotlib.axes.Axes, optional
        Where to; by default in a new figure.
    step : int, optional
        Number of the step, from 1; by default the last one.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    with painting(axes, 8.4, 3.6) as (figure, axes):
        shown = _shown(timeline, step)
        if shown is None:
            what = "no step was recorded" if not timeline.steps else f"there is no step {step}"
            say_empty(axes, f"Overlap: {what}")
            return figure
        lanes = _lanes(timeline.spans, shown)
        _paint(axes, lanes, shown)
        title(axes, f"E  step {shown.number}: what happened at the same time", _words(shown))
        note_below(axes, bound(shown))
    return figure


def bound(step: StepRecord) -> str:
    """Say what a step took its time for."""
    if step.seconds <= 0:
        return "the step took no time"
    computed, waited = step.compute / step.seconds, step.stall / step.seconds
    shares = {
        "compute": computed,
        "waiting for the drive": waited,
        "neither": max(0.0, 1 - computed - waited),
    }
    return "of the step: " + ", ".join(f"{100 * n:.0f} % {name}" for name, n in shares.items())


def _shown(timeline: Timeline, step: int | None) -> StepRecord | None:
    if step is None:
        return timeline.steps[-1] if timeline.steps else None
    return next((each for each in timeline.steps if each.number == step), None)


def _words(step: StepRecord) -> list[str]:
    moved = f"{format_bytes(step.bytes_read)} in, {format_bytes(step.bytes_written)} out"
    return [
        f"{1e3 * step.seconds:.1f} ms",
        moved,
        f"{step.gbps:.2f} GB/s",
        f"{step.hidden_pct:.0f} % of the transfers' time hidden",
        f"stalled {step.stall_pct:.0f} %",
    ]


def _lanes(spans: Sequence[Span], step: StepRecord) -> dict[str, list[tuple[float, float, int]]]:
    """Return begin, duration in ms and place of what is to be drawn, by lane."""
    end = step.begin + step.seconds
    lanes: dict[str, list[tuple[float, float, int]]] = {name: [] for name in _LOOKS}
    free: dict[str, list[float]] = {"read": [], "write": []}
    for span in sorted(spans, key=lambda each: each.begin):
        begin, until = max(span.begin, step.begin), min(span.end, end)
        if begin >= until:
            continue
        lane = {"compute": "compute", "stall": "waiting"}.get(span.kind)
        place = 0
        if lane is None:
            lane = "write" if span.written else "read"
            place = _place(free[lane], span.begin, span.end)
        lanes[lane].append((1e3 * (begin - step.begin), 1e3 * (until - begin), place))
    return lanes


def _place(free: list[float], begin: float, end: float) -> int:
    """Return the first place that nothing is in at `begin`, and take it until `end`."""
    for number, until in enumerate(free):
        if until <= begin:
            free[number] = end
            return number
    if len(free) < _DEEP:
        free.append(end)
        return len(free) - 1
    free[-1] = max(free[-1], end)
    return _DEEP - 1


def _paint(axes: Axes, lanes: dict[str, list[tuple[float, float, int]]], step: StepRecord) -> None:
    for y, (name, bars) in enumerate(lanes.items()):
        colour, hatch = _LOOKS[name]
        deep = 1 + max((place for _, _, place in bars), default=0)
        high = 0.8 / deep
        for place in range(deep):
            times = [(begin, took) for begin, took, at in bars if at == place]
            axes.broken_barh(
                times, (y - 0.4 + place * high, high * (0.9 if deep > 1 else 1.0)),
                facecolor=colour, edgecolor=INK, hatch=hatch, lw=0.4,
            )  # fmt: skip
    axes.set_yticks(
        range(len(lanes)),
        [name if bars else f"{name}\n(none)" for name, bars in lanes.items()],
    )
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, max(1e-3, 1e3 * step.seconds))
    axes.set_xlabel("time since the step began (ms)")
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", lw=0.6)
    axes.set_axisbelow(True)
