"""Traces that Chrome (``chrome://tracing``) and Perfetto show."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tensorspill.errors import BrokenError
from tensorspill.timeline.records import Timeline
from tensorspill.timeline.spans import Span

__all__ = ["trace_events", "write_trace"]

#: Lanes of transfers, far from the numbers of threads.
_READS, _WRITES, _STEPS = 1, 2, 0


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return what was recorded in the trace event format; times in microseconds."""
    pid = os.getpid()
    threads = {thread: 10 + n for n, thread in enumerate(_threads(timeline))}
    lanes = {_STEPS: "steps", _READS: "reads", _WRITES: "writes"}
    lanes |= {lane: f"thread {lane - 10}" for lane in threads.values()}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": lane, "args": {"name": name}}
        for lane, name in lanes.items()
    ]
    events += [
        _complete(pid, _STEPS, f"step {step.number}", "step", step.begin, step.seconds)
        for step in timeline.steps
    ]
    for number, span in enumerate(timeline.spans):
        if span.kind == "transfer":
            events += _transfer(pid, number, span)
        else:
            seconds = span.end - span.begin
            lane = threads[span.thread]
            events.append(_complete(pid, lane, span.name, span.kind, span.begin, seconds))
    return events


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a trace as JSON, in place of what is at `path`.

    Raises
    ------
    BrokenError
        It can't be written.
    """
    content = json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"})
    try:
        Path(path).write_text(content)
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't write the trace", path=path) from error


def _threads(timeline: Timeline) -> list[int]:
    return list(dict.fromkeys(s.thread for s in timeline.spans if s.kind != "transfer"))


def _complete(
    pid: int, lane: int, name: str, category: str, begin: float, seconds: float
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": pid,
        "tid": lane,
        "ts": begin * 1e6,
        "dur": seconds * 1e6,
    }


def _transfer(pid: int, number: int, span: Span) -> list[dict[str, Any]]:
    """Return the two ends of a transfer: those overlap, as lanes of threads must not."""
    common = {
        "name": f"{span.name} {'out' if span.written else 'in'}",
        "cat": "transfer",
        "id": number,
        "pid": pid,
        "tid": _WRITES if span.written else _READS,
    }
    about = {"bytes": span.nbytes, **span.by_path}
    return [
        {**common, "ph": "b", "ts": span.begin * 1e6, "args": about},
        {**common, "ph": "e", "ts": span.end * 1e6},
    ]
