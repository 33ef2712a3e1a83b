"""Arguments by which several commands say what to measure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tensorspill.profiling.points import Point

__all__ = ["add_grid", "add_output", "add_png", "add_size", "points_of", "size", "whole"]

Value = TypeVar("Value")

#: Argument → field of a point.
_FIELDS = {
    "engine": "backend",
    "memory": "memory",
    "device": "device",
    "tensor": "tensor_bytes",
    "threads": "threads",
    "block": "block_bytes",
    "depth": "depth",
}
_MEMORIES = ("aligned", "small-pages", "ordinary", "pinned")


def add_grid(parser: argparse.ArgumentParser) -> None:
    """Declare what may be varied; several values are separated by commas."""
    group = parser.add_argument_group("points", "several values are separated by commas")
    for name, kind, text in (
        ("--direction", _words("read", "write"), "read, write (both)"),
        ("--block", _list(size), "bytes of an operation, such as 256KiB,1MiB"),
        ("--depth", _list(whole), "operations under way for each thread"),
        ("--threads", _list(whole), "threads of the engine"),
        ("--tensor", _list(size), "bytes of each tensor (one tensor)"),
        ("--memory", _words(*_MEMORIES), f"host memory: {', '.join(_MEMORIES)}"),
        ("--device", _list(str), "where the tensors are: cpu, cuda:0"),
        ("--engine", _words("auto", "aio", "gds"), "auto, aio, gds"),
    ):
        group.add_argument(name, type=kind, metavar="LIST", help=text)
    group.add_argument("--fsync", choices=("yes", "no"), help="end writes with an fsync, or don't")
    group.add_argument("--numa", type=int, metavar="NODE", help="run threads on this NUMA node")


def add_size(parser: argparse.ArgumentParser, rounds: int = 5) -> None:
    """Declare how much is written and how often."""
    parser.add_argument("path", metavar="PATH", help="the folder to measure, on the drive")
    add = parser.add_argument
    add("--size", type=size, metavar="BYTES", help="of the file to measure with, such as 1GiB")
    add("--rounds", type=whole, default=rounds, metavar="N", help=f"of each point ({rounds})")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Declare where rows go."""
    add = parser.add_argument
    add("--out", metavar="FILE", help="add the rows to this file, as JSON lines")
    add("--csv", metavar="FILE", help="write the rows to this file, as CSV")
    add_png(parser)
    add("--json", action="store_true", help="print one JSON object, nothing else")


def add_png(parser: argparse.ArgumentParser) -> None:
    """Declare where a picture goes."""
    parser.add_argument("--png", metavar="FILE", help="draw a picture (needs matplotlib)")


def points_of(
    arguments: argparse.Namespace, total_bytes: int, **defaults: Sequence[Any]
) -> tuple[Point, ...] | None:
    """Return the points that were asked for by name, or None if nothing was.

    Parameters
    ----------
    arguments : argparse.Namespace
    total_bytes : int
        Of a round.
    **defaults : sequence
        Values of a point's fields where no argument says any; with them, there are always points.
    """
    from tensorspill.profiling.sweep import grid

    given = {
        field: value
        for name, field in _FIELDS.items()
        if (value := getattr(arguments, name)) is not None
    }
    others = (arguments.direction, arguments.fsync, arguments.numa)
    if not (given or defaults or any(other is not None for other in others)):
        return None
    columns: dict[str, Any] = {**defaults, **given, "numa": (arguments.numa,)}
    columns["fsync"] = (None if arguments.fsync is None else arguments.fsync == "yes",)
    return grid(arguments.direction or ("read", "write"), total_bytes, **columns)


def size(text: str) -> int:
    """Read a size in bytes, at least one."""
    from tensorspill.errors import SpillError
    from tensorspill.pool.sizes import parse_bytes

    try:
        value = parse_bytes(text)
    except SpillError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is nothing to measure with")
    return value


def whole(text: str) -> int:
    """Read a whole number, at least one."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _list(kind: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    def values(text: str) -> tuple[Value, ...]:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    return values


def _words(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    def values(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for word in found:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(allowed)}")
        return found

    return values
