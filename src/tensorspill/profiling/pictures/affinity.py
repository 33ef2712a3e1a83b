"""Panel G: how far each rank is from each device of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensorspill.profiling.pictures.drawing import (
    INK,
    MISSING,
    inches,
    ink_on,
    note_below,
    painting,
    say_empty,
    shortened,
    title,
)
from tensorspill.topology.affinity import Affinity, affinities, label_of, rank_distance
from tensorspill.topology.distances import CLASSES
from tensorspill.topology.machine import Device, Gpu, Machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["affinity_matrix"]

_MEANING = {
    "X": "the same",
    "NV": "NVLink",
    "PIX": "one switch at most",
    "PXB": "several switches",
    "PHB": "a host bridge",
    "NODE": "one NUMA node",
    "SYS": "another NUMA node",
    "?": "not known",
}


def affinity_matrix(
    machine: Machine,
    axes: Axes | None = None,
    *,
    ranks: Sequence[Affinity] | None = None,
) -> Figure:
    """Draw the class of distance from each rank to each GPU, NIC and drive.

    A rank's own NIC and drive are in boxes.

    Parameters
    ----------
    machine : Machine
    axes : matplotlib.axes.Axes, optional
        Where to; by default in a new figure, large enough for all.
    ranks : sequence of Affinity, optional
        By default one for each GPU, or one without a GPU where there are none.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    if ranks is None:
        ranks = affinities(machine, None if machine.gpus else [None])
    groups = [group for group in (machine.gpus, machine.nics, machine.drives) if group]
    devices: list[Device] = [device for group in groups for device in group]
    width, height = 2.4 + 0.5 * max(6, len(devices)), 2.3 + 0.34 * max(2, len(ranks))
    with painting(axes, width, height) as (figure, axes):
        if not devices or not ranks:
            say_empty(axes, f"{machine.hostname or 'The machine'}: no devices, or no ranks")
            return figure
        _paint(axes, machine, ranks, devices)
        at = -0.5
        for group in groups[:-1]:
            at += len(group)
            axes.axvline(at, color="white", lw=4)
            axes.axvline(at, color=INK, lw=0.8)
        counts = f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}, {len(devices)} devices"
        title(axes, f"G  {machine.hostname or 'machine'}: from ranks to devices", [counts])
        made_up = any(drive.synthetic for drive in machine.drives)
        said = "in boxes: the rank's own" + ("; drives' places are made up" if made_up else "")
        note_below(axes, said)
    return figure


def _paint(
    axes: Axes, machine: Machine, ranks: Sequence[Affinity], devices: Sequence[Device]
) -> None:
    import matplotlib as mpl
    import matplotlib.patches as shapes

    # Where cells are too small for words, their colours have to do.
    words = inches(axes)[0] - 1 > 0.3 * len(devices)
    colours = mpl.colormaps["cividis"]
    seen = set()
    for y, rank in enumerate(ranks):
        for x, device in enumerate(devices):
            found = rank_distance(machine, rank, device)
            seen.add(found.kind)
            fill, ink, hatch = _look(found.kind, colours)
            axes.add_patch(
                shapes.Rectangle((x - 0.5, y - 0.5), 1, 1, fc=fill, ec="white", lw=1.0, hatch=hatch)
            )
            if not isinstance(device, Gpu) and device.name in (rank.nic, rank.drive):
                for colour, width in (("white", 3.6), ("black", 1.6)):
                    axes.add_patch(
                        shapes.Rectangle(
                            (x - 0.44, y - 0.42), 0.88, 0.84, fc="none", ec=colour, lw=width,
                            zorder=4,
                        )
                    )  # fmt: skip
            if words:
                axes.text(
                    x, y, found.label, ha="center", va="center", fontsize=6.5, color=ink, zorder=5
                )
    axes.set_xlim(-0.5, len(devices) - 0.5)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xticks(
        range(len(devices)), [shortened(label_of(device), 14) for device in devices],
        rotation=45, ha="right", rotation_mode="anchor",
    )  # fmt: skip
    axes.set_yticks(range(len(ranks)), [str(rank.rank) for rank in ranks])
    axes.set_ylabel("rank")
    axes.set_xlabel("device")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles = []
    for kind in CLASSES:
        if kind in seen:
            fill, _, hatch = _look(kind, colours)
            handles.append(
                shapes.Patch(fc=fill, hatch=hatch, ec="#9ca3af", label=f"{kind}: {_MEANING[kind]}")
            )
    within: Any = axes.figure
    columns = max(1, min(len(handles), int(inches(axes)[0] / 1.9)))
    within.legend(handles=handles, loc="outside lower center", ncols=columns)


def _look(kind: str, colours: Any) -> tuple[Any, str, str]:
    """Return fill, ink and hatch: the nearer, the lighter; what is not known is grey."""
    if kind == "?":
        return MISSING, INK, "////"
    share = 1 - CLASSES.index(kind) / (len(CLASSES) - 2)
    fill = colours(share)
    return fill, ink_on(fill), ""
