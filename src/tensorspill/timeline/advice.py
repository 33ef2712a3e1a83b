"""Whether a job is bound by the drive, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorspill.timeline.records import StepRecord

__all__ = ["Advice", "advise"]

#: Steps that are looked at; the first one of a job, which learns the order, is never among them.
_STEPS = 3
#: Compute that waits for more than this part of a step is bound by the drive.
_WAITING = 0.15
#: Transfers that take less than this part of a step could have been hidden behind the rest of it.
_BUSY = 0.7
#: More than this part of the bytes on slower paths than the direct ones is worth a remark.
_INDIRECT = 0.1

_DIRECT = frozenset(("direct", "compat"))


@dataclass(frozen=True, slots=True)
class Advice:
    """Why steps wait for the drive.

    Attributes
    ----------
    reason : {"rate", "order", "path"}
        The drive is too slow for the bytes; the bytes come too late; they go a slow path.
    text : str
        What was seen.
    remedies : tuple of str
        What would help, the most effective first.
    """

    reason: str
    text: str
    remedies: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.text}. What helps: {'; '.join(self.remedies)}"


def advise(steps: Sequence[StepRecord]) -> Advice | None:
    """Return what to do if the latest steps were bound by the drive, or None."""
    latest = steps[1:][-_STEPS:]
    seconds = sum(step.seconds for step in latest)
    waited = sum(step.stall for step in latest)
    if len(latest) < _STEPS or not seconds or waited < _WAITING * seconds:
        return None
    share = f"{100 * waited / seconds:.0f} % of the step's time"
    indirect = _indirect(latest)
    if indirect:
        return Advice(
            "path",
            f"Compute waits for the drive in {share}, and {indirect} don't go the direct path",
            (
                "a file system that allows O_DIRECT",
                "a larger resident budget",
                "see the reasons in the engine's statistics",
            ),
        )
    if sum(step.transfer for step in latest) < _BUSY * seconds:
        return Advice(
            "order",
            f"Compute waits for the drive in {share}, although the drive is idle in much of it",
            (
                "a larger resident budget, so that more can be fetched ahead",
                "smaller blocks",
                "the same order of blocks in every step",
            ),
        )
    return Advice(
        "rate",
        f"The drive bounds the job: compute waits in {share}, at "
        f"{sum(s.nbytes for s in latest) / sum(s.transfer for s in latest) / 1e9:.2f} GB/s",
        (
            "more compute for each byte moved: a larger batch, or gradients accumulated over "
            "several batches",
            "a larger resident budget",
            "fewer bytes: gradients in memory, a lower precision",
            "more drives: a list of folders stripes over them",
        ),
    )


def _indirect(steps: Sequence[StepRecord]) -> str | None:
    nbytes = sum(step.nbytes for step in steps)
    other = sum(n for step in steps for path, n in step.by_path.items() if path not in _DIRECT)
    return f"{100 * other / nbytes:.0f} % of the bytes" if other > _INDIRECT * nbytes else None
