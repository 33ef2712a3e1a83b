"""A machine in the terminal: a tree, what is near each rank, and distances.

Classes are words, so that nothing is lost without colour; tables are cut into pieces that fit.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from tensorspill.topology.affinity import Affinity, crossing, label_of, rank_distance
from tensorspill.topology.discovery.paths import Storage
from tensorspill.topology.machine import Device, Gpu, Machine
from tensorspill.topology.outline import Branch, numbers, outline

__all__ = ["show"]

_STYLES = {"gpu": "green", "nic": "cyan", "drive": "yellow", "unknown": "red", "memory": "dim"}
_NEAR = {"X": "dim", "NV": "bold green", "PIX": "bold green", "PXB": "green", "PHB": "yellow",
         "NODE": "yellow", "SYS": "red", "?": "magenta"}  # fmt: skip
_LEGEND = (
    "NV# bonded NVLinks · PIX one PCIe switch at most · PXB several switches · PHB a host "
    "bridge · NODE within a NUMA node · SYS between NUMA nodes · ? unknown · * the rank's own"
)


def show(
    machine: Machine,
    ranks: Sequence[Affinity],
    storage: Storage | None = None,
    console: Console | None = None,
) -> None:
    """Print a machine, what is near its ranks, and which drives hold a path."""
    if console is None:
        # A terminal of few characters shows another in place of those that it lacks.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        console = Console(highlight=False)
    _show_tree(console, machine)
    _show_ranks(console, ranks)
    for title, devices in (
        ("GPUs", machine.gpus),
        ("NICs", machine.nics),
        ("drives", machine.drives),
    ):
        _show_matrix(console, machine, ranks, title, devices)
    console.print(_LEGEND, style="dim")
    if storage is not None:
        _show_path(console, machine, ranks, storage)
    for note in machine.notes:
        console.print(f"Note: {escape(note)}.", style="dim")


def _show_tree(console: Console, machine: Machine) -> None:
    counts = ((len(machine.sockets), "socket"), (len(machine.gpus), "GPU"),
              (len(machine.nics), "NIC"), (len(machine.drives), "drive"))  # fmt: skip
    words = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts]
    head = f"[bold]{escape(machine.hostname or 'machine')}[/] · {' · '.join(words)}"
    tree = Tree(head, guide_style="dim")
    for branch in outline(machine):
        _add(tree, branch, console.width - 4)
    for stack in machine.stacks:
        made_of = f"{stack.kind} of {len(stack.drives)} drives: {', '.join(stack.drives)}"
        tree.add(f"[yellow]{escape(stack.name)}[/] [dim]{escape(made_of)}[/]")
    for mount in machine.mounts:
        if mount.device or mount.shared:
            on = mount.device or "a network"
            tree.add(f"{escape(mount.path)} [dim]{escape(f'{mount.filesystem} on {on}')}[/]")
    console.print(tree)


def _add(tree: Tree, branch: Branch, room: int) -> None:
    """Add a branch, with as many details as fit on its line."""
    style = _STYLES.get(branch.kind, "bold" if branch.kind in ("socket", "node") else "")
    title = f"[{style}]{escape(branch.title)}[/]" if style else escape(branch.title)
    detail = ""
    for word in branch.details:
        longer = f"{detail} · {word}" if detail else word
        if detail and len(branch.title) + 1 + len(longer) > room:
            break
        detail = longer
    own = tree.add(f"{title} [dim]{escape(detail)}[/]" if detail else title)
    for child in branch.children:
        _add(own, child, room - 4)


def _show_ranks(console: Console, ranks: Sequence[Affinity]) -> None:
    console.print("\n[bold]Near each rank[/]")
    table = _table()
    for name in ("rank", "GPU", "NUMA", "socket", "NIC", "drive"):
        right = name in ("rank", "NUMA", "socket")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("CPUs", overflow="fold")
    for rank in ranks:
        table.add_row(
            str(rank.rank),
            rank.gpu or "none",
            *("?" if value is None else str(value) for value in (rank.numa_node, rank.socket)),
            _near(rank.nic, rank.nic_distance),
            _near(rank.drive, rank.drive_distance),
            # With spaces, so that they are parted between ranges where the terminal is narrow.
            numbers(rank.cpus).replace(",", ", ") or "?",
        )
    console.print(table)


def _near(name: str | None, kind: str) -> str:
    return "none" if name is None else f"{escape(name)} [{_NEAR[kind]}]{kind}[/]"


def _show_matrix(
    console: Console,
    machine: Machine,
    ranks: Sequence[Affinity],
    title: str,
    devices: Sequence[Device],
) -> None:
    """Print distances from ranks to devices of a kind, in pieces that fit the terminal."""
    names = [label_of(device) for device in devices]
    each = max(map(len, [*names, "NV18*"])) + 2
    fit = max(1, (console.width - 7) // each)
    if devices:
        console.print(f"[bold]From each rank to {title}[/]")
    for first in range(0, len(devices), fit):
        table = _table()
        table.add_column("rank", justify="right")
        for name in names[first : first + fit]:
            table.add_column(escape(name), no_wrap=True, min_width=each - 2)
        for rank in ranks:
            cells = [_cell(machine, rank, device) for device in devices[first : first + fit]]
            table.add_row(str(rank.rank), *cells)
        console.print(table)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _cell(machine: Machine, rank: Affinity, device: Device) -> str:
    found = rank_distance(machine, rank, device)
    chosen = not isinstance(device, Gpu) and device.name in (rank.nic, rank.drive)
    return f"[{_NEAR[found.kind]}]{found.label}[/]{'*' if chosen else ''}"


def _show_path(
    console: Console, machine: Machine, ranks: Sequence[Affinity], storage: Storage
) -> None:
    held = ", ".join(storage.drives) or f"no known drive ({storage.why('device')})"
    line = f"{storage.path} lies on {held}: {storage.filesystem} mounted at {storage.mount}"
    console.print(escape(line))
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        if text := crossing(machine, rank, storage):
            alike.setdefault(text.split(" ", 2)[2], []).append(rank.rank)
    for text, numbered in alike.items():
        others = f" The same holds for ranks {numbers(numbered[1:])}." if numbered[1:] else ""
        console.print(f"[red]Warning:[/] {escape(f'Rank {numbered[0]} {text}.{others}')}")
