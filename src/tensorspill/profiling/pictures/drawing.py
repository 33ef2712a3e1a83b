"""What all pictures share: matplotlib, imported late, their look, and how they are saved.

Colours come from scales that are even in lightness and from pairs that colour-blind people can
tell apart; what they tell is told by a marker, a hatch or a word as well.
"""

from __future__ import annotations

import base64
import importlib
import io
import os
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tensorspill.errors import BrokenError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "INK",
    "MISSING",
    "SOFT",
    "binary",
    "data_uri",
    "inches",
    "look",
    "narrow",
    "new_figure",
    "note_below",
    "painting",
    "save",
    "say_empty",
    "shades",
    "shortened",
]

INK, SOFT, MISSING = "#1f2937", "#4b5563", "#e5e7eb"

#: Marks the words above a panel.
_WORDS = "words"
#: How often words are shortened and everything is placed again.
_TRIES = 6
#: Inches.
_NARROW = 5.5
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
_LOOK = {
    # Text stays as it is: a name with a dollar is no formula.
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": "#e5e7eb",
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "svg.fonttype": "path",
    # The same picture has the same bytes.
    "svg.hashsalt": "tensorspill",
}


def check_matplotlib() -> Any:
    """Return matplotlib, before anything is measured that is to be drawn.

    Raises
    ------
    UnsupportedError
        It is not installed.
    """
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise UnsupportedError(
            f"Pictures need matplotlib: {error}", remedy="pip install tensorspill[notebook]"
        ) from error


@contextmanager
def look(**changes: Any) -> Iterator[None]:
    """Return a context in which matplotlib draws as all pictures here look.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    with check_matplotlib().rc_context(_LOOK | changes), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes, and no reason to fail.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        # Nor is a picture too small for its words, which are then cut.
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        yield


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """Return a figure of so many inches, which no window knows of. Call it within `look`."""
    figures = importlib.import_module("matplotlib.figure")
    made: Figure = figures.Figure(figsize=(width, height), facecolor="white", **options)
    return made


@contextmanager
def painting(axes: Axes | None, width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """Return a context to paint in: in the axes given, or in those of a new figure."""
    with look():
        if axes is None:
            axes = new_figure(width, height, layout="constrained").add_subplot()
        # Of a part of a figure, the whole.
        figure: Any = axes.figure.canvas.figure
        alone = len(figure.get_axes()) == 1
        yield figure, axes
        if alone:
            keep_inside(figure)


def keep_inside(figure: Figure) -> None:
    """Shorten the words above and below panels where they would leave their part of a figure.

    How wide they are, and where they begin, is known when everything else has its place, which
    they change in turn. Panels do so themselves where they are alone in a figure.
    """
    words: list[tuple[Any, Any]] = []
    for axes in figure.get_axes():
        room = axes.figure.bbox
        words.append((axes.xaxis.label, room))
        words += [(child, room) for child in axes.get_children() if child.get_gid() == _WORDS]
    fits = 0
    for _ in range(_TRIES):
        figure.draw_without_rendering()
        cut = [_cut(text, room) for text, room in words]
        # Places settle in the second pass only.
        fits = 0 if any(cut) else fits + 1
        if fits == 2:
            break


def _cut(text: Any, room: Any) -> bool:
    """Shorten a text that leaves a room, and return whether it did."""
    box = text.get_window_extent()
    outside = max(box.x1 - room.x1, room.x0 - box.x0)
    if outside <= 1:
        return False
    # What is centred loses at both ends.
    lost = outside * (2 if text.get_ha() == "center" else 1)
    lines = text.get_text().split("\n")
    most = int(max(map(len, lines)) * max(0.5, 1 - lost / box.width)) - 1
    text.set_text("\n".join(shortened(line, max(8, most)) for line in lines))
    return True


def save(figure: Figure, path: str | os.PathLike[str], kind: str = "png") -> None:
    """Write a figure into a file.

    Raises
    ------
    BrokenError
        It can't be written.
    """
    content = _rendered(figure, kind)
    try:
        with open(path, "wb") as file:
            file.write(content)
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't write the picture", path=path) from error


def data_uri(figure: Figure) -> str:
    """Return a figure as the address of an image that needs nothing else: SVG, in base 64."""
    return "data:image/svg+xml;base64," + base64.b64encode(_rendered(figure, "svg")).decode()


def _rendered(figure: Figure, kind: str) -> bytes:
    file = io.BytesIO()
    with look():
        # Without a date, the same picture has the same bytes.
        about = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, dpi=150, metadata=about)
    return file.getvalue()


def shades(count: int) -> list[tuple[Any, str]]:
    """Return so many colours, from dark to light, each with a marker of its own."""
    colours = importlib.import_module("matplotlib").colormaps["viridis"]
    # The lightest are hard to see on white.
    places = [0.82 * number / max(1, count - 1) for number in range(count)]
    return [(colours(at), _MARKERS[n % len(_MARKERS)]) for n, at in enumerate(places)]


def ink_on(colour: tuple[float, float, float, float]) -> str:
    """Return black or white, whichever is read better on a colour."""
    # Relative luminance, and the place where both have the same contrast.
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if light > 0.179 else "white"


def binary(nbytes: int) -> str:
    """Return a size exactly, in the largest binary unit that divides it: "256 KiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes:,} B"


def shortened(text: str, most: int) -> str:
    """Return a text on one line, in at most so many characters: its middle is left out."""
    text = "".join(each if each.isprintable() else " " for each in text)
    if len(text) <= most:
        return text
    end = (most - 1) // 3
    return f"{text[: most - 1 - end]}…{text[len(text) - end :]}"


def _fitting(words: Sequence[str], most: int) -> str:
    """Return as many words as so many characters take, with dots between them."""
    text = ""
    for word in words:
        longer = f"{text} · {word}" if text else word
        if text and len(longer) > most:
            break
        text = longer
    return shortened(text, most)


def inches(axes: Axes) -> tuple[float, float]:
    """Return width and height of what a panel is in: the figure, or its part of one."""
    within: Any = axes.figure
    return within.bbox.width / within.dpi, within.bbox.height / within.dpi


def narrow(axes: Axes) -> bool:
    """Whether there is little room beside each other."""
    return inches(axes)[0] < _NARROW


def characters(axes: Axes, points: float) -> int:
    """Return about how many characters of a size fit beside each other."""
    return max(12, int(72 * inches(axes)[0] / (0.6 * points)) - 8)


def title(axes: Axes, head: str, words: Sequence[str] = ()) -> None:
    """Write what is shown, and below it in small of what, as far as there is room."""
    detail = _fitting([word for word in words if word], characters(axes, 8))
    above = axes.set_title(shortened(head, characters(axes, 10)), pad=20 if detail else 6)
    above.set_gid(_WORDS)
    if detail:
        axes.annotate(
            detail,
            (0, 1),
            (0, 6),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=8,
            color=SOFT,
            annotation_clip=False,
            gid=_WORDS,
            # A long line must not make the panel narrow; the title leaves room for its height.
            in_layout=False,
        )


def note_below(axes: Axes, text: str) -> None:
    """Write a line below the name of the horizontal axis."""
    label = axes.get_xlabel()
    line = shortened(text, characters(axes, 8))
    axes.set_xlabel(f"{label}\n{line}" if label else line, fontsize=8.5)


def say_empty(axes: Axes, why: str) -> None:
    """Say why there is nothing to see."""
    axes.set_axis_off()
    axes.text(
        0.5,
        0.5,
        "\n".join(_wrapped(why, max(16, characters(axes, 9) - 6))),
        ha="center",
        va="center",
        color=SOFT,
        transform=axes.transAxes,
    )


def _wrapped(text: str, most: int) -> list[str]:
    return textwrap.wrap(shortened(text, 6 * most), most) or [""]
