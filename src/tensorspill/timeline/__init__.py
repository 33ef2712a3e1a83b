"""What a step was made of: compute, transfer and stall, as frozen records."""

from tensorspill.timeline.spans import Span, span, watch

__all__ = ["Span", "span", "watch"]
