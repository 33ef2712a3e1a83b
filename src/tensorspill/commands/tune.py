"""``tensorspill tune``: finds the settings of a device, and makes engines use them by default."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from tensorspill.commands.point_arguments import size

if TYPE_CHECKING:
    from tensorspill.profiling.tune import Candidate, Tuned

__all__ = ["HELP", "add_arguments", "run"]

HELP = "find the smallest settings that are nearly as fast as a drive's best, for engines to use"

_SIZE = 256 << 20
_SECONDS = 45.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("path", metavar="PATH", help="the folder, on the drive")
    add("--read", type=_share, default=0.5, metavar="SHARE", help="of the bytes, 0 to 1 (0.5)")
    add("--tensor", type=size, metavar="BYTES", help="size of tensors (large ones)")
    add("--device", default="cpu", help="where the tensors are: cpu, cuda:0 (cpu)")
    add("--engine", choices=("auto", "aio", "gds"), default="auto", help="which engine (auto)")
    add("--seconds", type=_seconds, default=_SECONDS, metavar="S", help="to take (45)")
    add("--size", type=size, default=_SIZE, metavar="BYTES", help="of the file (256MiB)")
    add("--dry-run", action="store_true", help="write no settings file")
    add("--json", action="store_true", help="print one JSON object, nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Tune, write the settings file, and print what to set; return 0."""
    from tensorspill.commands.measured_text import progress
    from tensorspill.engine.tuned import write_tuned
    from tensorspill.opening import device_key
    from tensorspill.profiling.site import Site
    from tensorspill.profiling.tune import Mix, candidates, tune

    mix = Mix(arguments.read, arguments.tensor, arguments.device, arguments.engine)
    with (
        progress() as tick,
        Site(arguments.path, arguments.size, lambda text: tick(0, 1, text)) as site,
    ):
        tried = candidates(site.nbytes, len(os.sched_getaffinity(0)))
        found = tune(site, mix, tried, arguments.seconds, tick)
    kind = "staged" if arguments.device != "cpu" and found.engine == "aio" else found.engine
    path = None
    if not arguments.dry_run:
        path = write_tuned(device_key(arguments.path), kind, found.choice.options)
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(found, path, kind)) + "\n")
    else:
        _show(found, path, kind)
    return 0


def _as_json(found: Tuned, path: str | None, kind: str) -> dict[str, Any]:
    from tensorspill.profiling.tune import deepspeed_block

    return {
        "choice": _described(found.choice),
        "best": _described(found.best),
        "finalists": [_described(candidate) for candidate in found.finalists],
        "tried": found.tried,
        "seconds": found.seconds,
        "engine": kind,
        "file": path,
        "deepspeed": deepspeed_block(found.choice.options, found.engine == "gds"),
        "rows": [row.to_json() for row in found.rows],
    }


def _described(candidate: Candidate) -> dict[str, Any]:
    import statistics

    return candidate.options | {
        "in_flight_bytes": candidate.cost[0],
        "gbps": statistics.median(candidate.gbps),
        "rounds": len(candidate.gbps),
    }


def _show(found: Tuned, path: str | None, kind: str) -> None:
    from tensorspill.commands.measured_text import output, plain
    from tensorspill.pool.sizes import format_bytes
    from tensorspill.profiling.points import size_text
    from tensorspill.profiling.tune import deepspeed_block

    console = output()
    mix = f"{found.mix.read:.0%} reads" if found.mix.directions != ("read",) else "reads alone"
    console.print(f"{found.tried} settings in {found.seconds:.0f} s, for {mix}:", markup=False)
    for each in found.finalists:
        said = _described(each)
        mark = "*" if each is found.choice else " "
        text = (
            f"{mark} {size_text(each.block_bytes):>7} x {each.depth:<3} x {each.threads} "
            f"threads  {said['gbps']:.2f} GB/s  {format_bytes(each.cost[0])} in flight"
        )
        console.print(text, markup=False, overflow="fold")
    text = "* is the smallest that is surely within 95 % of the fastest"
    console.print(text, markup=False, overflow="fold")
    if path is None:
        console.print("No settings file was written.", markup=False)
    else:
        text = f"Engines ({kind}) use it by default on this device: {path}"
        console.print(plain(text), markup=False, overflow="fold")
    console.print("For DeepSpeed's configuration:", markup=False)
    block = deepspeed_block(found.choice.options, found.engine == "gds")
    console.print(json.dumps(block, indent=2), markup=False)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds")
    return value
