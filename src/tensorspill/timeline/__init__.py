"""What a step was made of: compute, transfer and stall, as frozen records.

Parts of this library, and you, mark what they do with `span` and `watch`, which cost next to
nothing while nobody listens; `recording` listens.
"""

from tensorspill.timeline.advice import Advice
from tensorspill.timeline.endurance import Endurance, Wear
from tensorspill.timeline.line import line
from tensorspill.timeline.recording import Recording, recording
from tensorspill.timeline.records import StepRecord, Timeline
from tensorspill.timeline.spans import Span, span, watch
from tensorspill.timeline.trace import trace_events, write_trace

__all__ = [
    "Advice",
    "Endurance",
    "Recording",
    "Span",
    "StepRecord",
    "Timeline",
    "Wear",
    "line",
    "recording",
    "span",
    "trace_events",
    "watch",
    "write_trace",
]
