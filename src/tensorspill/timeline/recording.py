"""Recording what a job does, step by step."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tensorspill.errors import UnsupportedError
from tensorspill.timeline.advice import Advice, advise
from tensorspill.timeline.endurance import Endurance, Wear
from tensorspill.timeline.nvtx import NvtxRanges
from tensorspill.timeline.records import StepRecord, Timeline, record_step
from tensorspill.timeline.spans import Kind, Span, add_listener, remove_listener

__all__ = ["Recording", "recording"]

log = logging.getLogger(__name__)

#: Spans kept for a trace; older ones are dropped, so that a long job can be recorded.
_MOST_SPANS = 200_000


class Recording:
    """What is recorded, while it is recorded; made by `recording`.

    Parameters
    ----------
    endurance : Endurance, optional
        What the drive is good for.
    most_spans : int
        How many spans to keep; the records of steps count all.

    Attributes
    ----------
    steps : list of StepRecord
        So far.
    """

    def __init__(self, endurance: Endurance | None = None, most_spans: int = _MOST_SPANS) -> None:
        self.steps: list[StepRecord] = []
        self._endurance = endurance
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=most_spans)
        self._count = 0
        self._step: list[Span] | None = None
        self._moved = [0, 0]
        self._begin = time.perf_counter()
        self._advised: set[str] = set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context that is one step; a step that raises is recorded as well.

        Logs a warning, once for each reason, when the job is bound by the drive.

        Raises
        ------
        UnsupportedError
            A step is under way.
        """
        with self._lock:
            if self._step is not None:
                raise UnsupportedError("Steps can't be nested")
            spans = self._step = []
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self._step = None
            self.steps.append(record_step(len(self.steps) + 1, begin, end, spans))
            self._warn()

    def timeline(self) -> Timeline:
        """Return what was recorded so far."""
        with self._lock:
            spans = tuple(self._spans)
            return Timeline(
                tuple(self.steps), spans, self._count - len(spans), self._moved[0], self._moved[1]
            )

    def advice(self) -> Advice | None:
        """Return whether the latest steps were bound by the drive, and what would help."""
        return advise(self.steps)

    def wear(self) -> Wear | None:
        """Return what the bytes written mean for the drive; None without its rating."""
        if self._endurance is None:
            return None
        seconds = time.perf_counter() - self._begin
        return self._endurance.after(self._moved[1], seconds)

    def begun(self, kind: Kind, name: str) -> None:
        """Do nothing: spans are recorded when they end (see `Listener`)."""

    def ended(self, span: Span) -> None:
        """Record a span (see `Listener`)."""
        with self._lock:
            self._spans.append(span)
            self._count += 1
            self._moved[span.written] += span.nbytes
            if self._step is not None:
                self._step.append(span)

    def _warn(self) -> None:
        advice = self.advice()
        if advice is not None and advice.reason not in self._advised:
            self._advised.add(advice.reason)
            log.warning("%s", advice)


@contextmanager
def recording(
    *, endurance: Endurance | None = None, nvtx: bool | None = None
) -> Iterator[Recording]:
    """Return a context in which all spans of the process are recorded.

    Parameters
    ----------
    endurance : Endurance, optional
        What the drive is good for; see `Recording.wear`.
    nvtx : bool, optional
        Mark spans as NVTX ranges for NVIDIA's profilers; by default where CUDA is in use.

    Examples
    --------
    >>> with recording() as recorded:  # doctest: +SKIP
    ...     for batch in data:
    ...         with recorded.step():
    ...             train(batch)
    ...         print(line(recorded.steps[-1]))
    """
    recorded = Recording(endurance)
    ranges = NvtxRanges.wanted(nvtx)
    add_listener(recorded)
    try:
        if ranges is not None:
            add_listener(ranges)
        yield recorded
    finally:
        remove_listener(recorded)
        if ranges is not None:
            remove_listener(ranges)
