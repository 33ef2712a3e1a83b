"""``tensorspill doctor``: what this machine can do, layer by layer, and what remedies there are."""

from __future__ import annotations

import argparse
import json
import math
import sys

__all__ = ["HELP", "add_arguments", "run"]

HELP = "say which layers of the path between drives and GPUs work here, and why others don't"

_WORKS, _DOES_NOT = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("path", nargs="?", default=".", metavar="PATH", help="the folder that files would be in")
    add("--backend", choices=("auto", "aio", "gds"), default="auto", help="which one must work")
    add("--gpu", type=int, default=0, metavar="N", help="number of the GPU to try (0)")
    add("--root", default="/", metavar="FOLDER", help="where sys and proc are; nothing is tried")
    add("--limit", type=_seconds, default=60.0, metavar="S", help="seconds for what may hang (60)")
    add("--json", action="store_true", help="print one JSON object, nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Look and report; return 0 if the backend asked for would work, else 1."""
    from tensorspill.doctor.examination import examine

    found = examine(arguments.path, arguments.root, device=arguments.gpu, limit=arguments.limit)
    works = found.backend(arguments.backend).state == "ok"
    if arguments.json:
        whole = found.to_json() | {"backend": arguments.backend, "works": works}
        sys.stdout.write(json.dumps(whole) + "\n")
    else:
        from tensorspill.commands.doctor_text import show

        show(found, arguments.backend)
    return _WORKS if works else _DOES_NOT


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds")
    return value
