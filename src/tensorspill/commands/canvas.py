"""What a picture of a machine is painted with: boxes, texts, links."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Canvas", "fitting"]

_LINE, _NVLINK = "#9ca3af", "#15803d"


class Canvas:
    """Paints into matplotlib's axes, in inches from the top left.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Axes that fill a figure.
    width, height : float
        Size of the figure.
    """

    def __init__(self, axes: Any, width: float, height: float) -> None:
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.axis("off")
        self._axes = axes
        self._patches = importlib.import_module("matplotlib.patches")
        self._path = importlib.import_module("matplotlib.path").Path

    def box(
        self,
        place: tuple[float, float, float, float],
        fill: str,
        edge: str = "none",
        *,
        line: float = 1.0,
        radius: float = 0.07,
        dashed: bool = False,
        layer: int = 3,
    ) -> None:
        """Paint a box with round corners, at left, top, width and height."""
        left, top, width, height = place
        style = f"round,pad={radius},rounding_size={radius}"
        self._axes.add_patch(
            self._patches.FancyBboxPatch(
                (left + radius, top + radius),
                width - 2 * radius,
                height - 2 * radius,
                boxstyle=style,
                fc=fill,
                ec=edge,
                lw=line,
                ls=(0, (3, 2)) if dashed else "-",
                zorder=layer,
            )
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        points: float,
        colour: str,
        *,
        weight: str = "normal",
        centre: bool = False,
    ) -> None:
        """Write a text; `x` is its left end or its middle."""
        side = "center" if centre else "left"
        self._axes.text(
            x, y, text, fontsize=points, color=colour, weight=weight, ha=side, va="center", zorder=5
        )

    def link(self, start: tuple[float, float], end: tuple[float, float], mbps: int | None) -> None:
        """Paint a PCIe link as a curve, thicker where it carries more, dotted if unknown."""
        (x0, y0), (x1, y1) = start, end
        middle = (y0 + y1) / 2
        curve = self._path([(x0, y0), (x0, middle), (x1, middle), (x1, y1)], [1, 4, 4, 4])
        width = 1.0 if mbps is None else 1.0 + min(mbps, 64000) / 16000
        style = ":" if mbps is None else "-"
        self._axes.add_patch(
            self._patches.PathPatch(curve, fc="none", ec=_LINE, lw=width, ls=style, zorder=2)
        )

    def wire(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Paint a straight NVLink."""
        xs, ys = zip(start, end, strict=True)
        self._axes.plot(xs, ys, color=_NVLINK, lw=1.1, alpha=0.55, zorder=1.5)


def fitting(words: tuple[str, ...], room: float, each: float) -> str:
    """Return as many words as fit into `room` inches, at so many for each character."""
    text = ""
    for word in words:
        longer = f"{text} · {word}" if text else word
        if len(longer) * each > room:
            break
        text = longer
    return text
