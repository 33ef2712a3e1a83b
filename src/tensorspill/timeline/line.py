"""A step in one line of a terminal."""

from __future__ import annotations

from tensorspill.pool.sizes import format_bytes
from tensorspill.timeline.records import StepRecord

__all__ = ["line"]

_BAR = 20


def line(step: StepRecord) -> str:
    """Return a step as one line of text.

    The bar divides the step: ``#`` compute, ``!`` compute that waits for the drive, ``.`` what is
    neither.
    """
    paths = ", ".join(
        f"{format_bytes(nbytes)} {path}"
        for path, nbytes in sorted(step.by_path.items(), key=lambda item: -item[1])
    )
    name = f"step {step.number}" if step.number else "all steps"
    return (
        f"{name}: {step.seconds:.3f} s [{_bar(step)}] stalled {step.stall:.3f} s, "
        f"{step.gbps:.2f} GB/s, {step.hidden_pct:.0f} % hidden, {paths or 'nothing moved'}"
    )


def _bar(step: StepRecord) -> str:
    if step.seconds <= 0:
        return "." * _BAR
    computed = min(_BAR, round(_BAR * step.compute / step.seconds))
    waited = min(_BAR - computed, round(_BAR * step.stall / step.seconds))
    return "#" * computed + "!" * waited + "." * (_BAR - computed - waited)
