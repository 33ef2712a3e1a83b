"""A picture of a machine: sockets as panels, the PCIe tree in them, devices at its ends."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from tensorspill.commands.canvas import Canvas, fitting
from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.topology.machine import Drive, Gpu, Machine, Nic
from tensorspill.topology.outline import Branch, outline, rate, size

__all__ = ["draw"]

_INK, _SOFT, _LINE = "#1f2937", "#6b7280", "#9ca3af"
_PANEL, _PANEL_EDGE, _NODE, _BOX = "#f8fafc", "#cbd5e1", "#eef2f7", "#ffffff"
_FILL = {"gpu": "#dcfce7", "nic": "#dbeafe", "drive": "#fef3c7"}
_EDGE = {"gpu": "#16a34a", "nic": "#2563eb", "drive": "#d97706"}
_NVLINK, _FABRIC = "#15803d", "#bbf7d0"

#: Inches: a device's column, a level of the tree, margins; and most columns of a row of panels.
_COLUMN, _LEVEL, _GAP, _MARGIN = 0.98, 0.72, 0.3, 0.35
_WIDEST = 26


def draw(machine: Machine, file: str, kind: str) -> None:
    """Draw a machine into a file.

    Parameters
    ----------
    machine : Machine
        What to draw.
    file : str
        Where to.
    kind : {"svg", "png"}
        What to write.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    BrokenError
        The file can't be written.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError(
            f"Pictures need matplotlib: {error}", remedy="pip install tensorspill[notebook]"
        ) from error
    # Text stays text in SVG, so that it can be searched and needs no font file.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "tensorspill", "font.family": "DejaVu Sans"}
    ):
        picture = _Picture(machine)
        figure = figures.Figure(figsize=(picture.width, picture.height), facecolor="white")
        picture.paint(Canvas(figure.add_axes((0, 0, 1, 1)), picture.width, picture.height))
        try:
            figure.savefig(
                file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None
            )
        except OSError as error:
            raise BrokenError.from_oserror(error, "Can't write the picture", path=file) from error


def _rows(panels: list[Branch]) -> list[list[Branch]]:
    """Return the panels in rows that are not too wide."""
    rows: list[list[Branch]] = [[]]
    for panel in panels:
        if rows[-1] and sum(map(_columns, [*rows[-1], panel])) > _WIDEST:
            rows.append([])
        rows[-1].append(panel)
    return rows


def _columns(branch: Branch) -> float:
    """Return the width of a branch in columns; panels with nothing below are as wide as a title."""
    if branch.kind in ("socket", "node", "memory", "unknown") and not branch.device:
        inner = sum(map(_columns, branch.children)) + 0.25 * max(0, len(branch.children) - 1)
        return max(inner + 0.4, 2.6)
    return max(1.0, sum(map(_columns, branch.children)))


def _depth(branch: Branch) -> int:
    return 1 + max(map(_depth, branch.children), default=0)


class _Picture:
    """Places and paints everything, in inches from the top left."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._panels = [p for p in outline(machine) if p.kind != "memory"]
        self._memory = [p for p in outline(machine) if p.kind == "memory"]
        self._rows = _rows(self._panels)
        widths = [sum(map(_columns, row)) * _COLUMN + _GAP * (len(row) - 1) for row in self._rows]
        self._heights = [max(map(self._panel_height, row), default=1.0) for row in self._rows]
        self.width = max([*widths, 7.5]) + 2 * _MARGIN
        self._fabric = 0.5 if any(gpu.nvlinks for gpu in machine.gpus) else 0.0
        # A title, the panels, the fabric below GPUs, and what is said below.
        self._footer = 0.23 * len(self._sayings()) + 0.3
        below = sum(self._heights) + (_GAP + self._fabric) * len(self._rows)
        self.height = 0.95 + below + self._footer

    def paint(self, canvas: Canvas) -> None:
        """Paint everything."""
        self._canvas = canvas
        self._joint: float | None = None
        self._title()
        top = 0.95
        for row, height in zip(self._rows, self._heights, strict=True):
            left = _MARGIN
            self._ends: list[float] = []
            for panel in row:
                width = _columns(panel) * _COLUMN
                self._panel(panel, left, top, width, height)
                left += width + _GAP
            top += height
            if self._fabric:
                self._nvlinks(top)
            top += _GAP + self._fabric
        for index, saying in enumerate(self._sayings()):
            self._canvas.text(_MARGIN, top + 0.1 + 0.23 * index, saying, 8.5, _SOFT)

    def _title(self) -> None:
        machine = self._machine
        counts = ((len(machine.sockets), "socket"), (len(machine.gpus), "GPU"),
                  (len(machine.nics), "NIC"), (len(machine.drives), "drive"))  # fmt: skip
        words = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts if count]
        self._canvas.text(_MARGIN, 0.4, machine.hostname or "machine", 17, _INK, weight="bold")
        self._canvas.text(_MARGIN, 0.7, " · ".join(words), 10, _SOFT)
        left = self.width - _MARGIN - 3 * 0.95
        for index, (kind, name) in enumerate((("gpu", "GPU"), ("nic", "NIC"), ("drive", "drive"))):
            x = left + index * 0.95
            self._canvas.box((x, 0.3, 0.22, 0.18), _FILL[kind], _EDGE[kind], radius=0.04)
            self._canvas.text(x + 0.3, 0.39, name, 9, _INK)

    def _sayings(self) -> list[str]:
        said = [
            "Thicker lines carry more, dotted ones an unknown rate; figures are for one direction."
        ]
        memory = " ".join(word for panel in self._memory for word in panel.details)
        if memory:
            said.append(f"Without CPUs, only memory: {memory}.")
        for stack in self._machine.stacks:
            where = [m.path for m in self._machine.mounts if m.device == stack.name]
            mounted = f", mounted at {', '.join(where)}" if where else ""
            said.append(f"{stack.name}: {stack.kind} of {len(stack.drives)} drives{mounted}.")
        if any(drive.synthetic for drive in self._machine.drives):
            said.append("Dashed: the place is made up, since no source gives it.")
        return said

    def _panel_height(self, panel: Branch) -> float:
        own = 0.5 + (0.36 if any(child.kind == "node" for child in panel.children) else 0.0)
        levels = max(map(_depth, self._below(panel)), default=0)
        return own + levels * _LEVEL + 0.15

    @staticmethod
    def _below(panel: Branch) -> list[Branch]:
        """Return the tops of the PCIe trees in a panel."""
        found: list[Branch] = []
        for child in panel.children:
            found.extend(child.children if child.kind == "node" else [child])
        return found

    def _panel(self, panel: Branch, left: float, top: float, width: float, height: float) -> None:
        place = (left, top, width, height)
        self._canvas.box(place, _PANEL, _PANEL_EDGE, line=1.2, radius=0.12, layer=1)
        title = panel.title[0].upper() + panel.title[1:]
        self._canvas.text(left + 0.16, top + 0.25, title, 11, _INK, weight="bold")
        room = width - 0.5 - 0.105 * len(title)
        self._canvas.text(
            left + 0.3 + 0.105 * len(title),
            top + 0.25,
            fitting(panel.details, room, 0.078),
            8.5,
            _SOFT,
        )
        self._children(panel, left + 0.2 * _COLUMN, top + 0.5, height - 0.6)

    def _children(self, panel: Branch, left: float, top: float, height: float) -> None:
        levels = max(map(_depth, self._below(panel)), default=1)
        for child in panel.children:
            width = _columns(child) * _COLUMN
            if child.kind == "node":
                self._canvas.box((left, top, width, height), _NODE, radius=0.09, layer=1)
                self._canvas.text(left + 0.12, top + 0.17, child.title, 9, _INK, weight="bold")
                details = fitting(child.details, width - 0.95, 0.07)
                self._canvas.text(left + 0.85, top + 0.17, details, 7.5, _SOFT)
                inner = left + (width - sum(map(_columns, child.children)) * _COLUMN) / 2
                self._trees(child.children, inner, top + 0.34, levels)
            else:
                self._trees((child,), left, top, levels)
            left += width + 0.25 * _COLUMN

    def _trees(self, branches: tuple[Branch, ...], left: float, top: float, levels: int) -> None:
        for branch in branches:
            # A device that hangs from nothing known stands beside the others, at the bottom.
            lower = (levels - 1) * _LEVEL if branch.device is not None else 0.0
            self._tree(branch, left, top + lower)
            left += _columns(branch) * _COLUMN

    def _tree(self, branch: Branch, left: float, top: float) -> float:
        """Paint a branch and what is below it; return its middle."""
        width = _columns(branch) * _COLUMN
        below = []
        inner = left
        for child in branch.children:
            below.append((child, self._tree(child, inner, top + _LEVEL)))
            inner += _columns(child) * _COLUMN
        middle = (below[0][1] + below[-1][1]) / 2 if below else left + width / 2
        for child, x in below:
            self._canvas.link((middle, top + 0.4), (x, top + _LEVEL), _carried(child))
        if branch.device is None:
            self._bridge(branch, middle, top)
        else:
            self._device(branch, middle, top)
        return middle

    def _bridge(self, branch: Branch, middle: float, top: float) -> None:
        name = {"host": "host", "switch": "switch"}.get(branch.kind, "bridge")
        short = branch.details[0] if branch.details else "bridge"
        short = short if branch.kind == "host" else short.removeprefix("0000:")
        fill = "#e5e7eb" if branch.kind == "host" else _BOX
        self._canvas.box((middle - 0.44, top + 0.02, 0.88, 0.38), fill, _LINE)
        self._canvas.text(middle, top + 0.13, name, 7.5, _INK, centre=True)
        self._canvas.text(middle, top + 0.29, short, 6.5, _SOFT, centre=True)

    def _device(self, branch: Branch, middle: float, top: float) -> None:
        device = branch.device
        dashed = isinstance(device, Drive) and device.synthetic
        place = (middle - 0.44, top, 0.88, 0.56)
        fill, edge = _FILL[branch.kind], _EDGE[branch.kind]
        self._canvas.box(place, fill, edge, line=1.2, dashed=dashed)
        small = 8.5 if len(branch.title) <= 8 else 7 if len(branch.title) <= 10 else 6
        self._canvas.text(middle, top + 0.12, branch.title, small, _INK, weight="bold", centre=True)
        for index, word in enumerate(_words(device)):
            self._canvas.text(middle, top + 0.285 + 0.15 * index, word, 6.5, _SOFT, centre=True)
        if isinstance(device, Gpu) and device.nvlinks:
            self._ends.append(middle)
            self._canvas.wire((middle, top + 0.56), (middle, self._bottom(top)))

    def _bottom(self, top: float) -> float:
        """Return where the fabric below a row of panels is."""
        edge = 0.95
        for height in self._heights:
            edge += height
            if top < edge:
                break
            edge += _GAP + self._fabric
        return edge + 0.2

    def _nvlinks(self, top: float) -> None:
        """Paint the fabric between GPUs below a row of panels."""
        if not self._ends:
            return
        y, left, right = top + 0.2, min(self._ends) - 0.44, max(self._ends) + 0.44
        self._canvas.box((left, y, right - left, 0.24), _FABRIC, _NVLINK)
        # The parts below each row are one fabric: they are joined at the left edge.
        edge, middle = _MARGIN / 2, y + 0.12
        if len(self._rows) > 1:
            self._canvas.wire((edge, middle), (left, middle))
        if self._joint is not None:
            self._canvas.wire((edge, self._joint), (edge, middle))
        self._joint = middle
        gpu = next(gpu for gpu in self._machine.gpus if gpu.nvlinks)
        switched = any(link.peer == "nvswitch" for link in gpu.nvlinks)
        count = max(link.count for link in gpu.nvlinks)
        what = f"NVSwitch · {count} links a GPU" if switched else f"NVLink · {count} links a pair"
        self._canvas.text((left + right) / 2, y + 0.12, what, 7.5, _NVLINK, centre=True)


def _words(device: Any) -> Iterator[str]:
    """Return two short lines about a device."""
    yield (device.bdf or "place unknown").removeprefix("0000:")
    if isinstance(device, Gpu):
        yield rate(device.link_mbps) or (
            size(device.memory_bytes, 1024) if device.memory_bytes else ""
        )
    elif isinstance(device, Nic):
        yield "" if device.mbps is None else f"{device.mbps * 8 / 1000:g} Gb/s"
    else:
        yield size(device.capacity, 1000) if device.capacity else ""


def _carried(branch: Branch) -> int | None:
    """Return what the link above a branch carries, in MB/s."""
    if branch.device is not None:
        return branch.device.link_mbps
    found = [rate for child in branch.children if (rate := _carried(child)) is not None]
    return max(found, default=None)
