"""``tensorspill demo``: train from the drive, and show that nothing is lost by it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

__all__ = ["HELP", "add_arguments", "run"]

HELP = "train a small GPT from the drive, its optimizer too, and compare with memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to put the spill file; a temporary folder is made in it and removed again "
        "(default: the user's cache folder, if that is on a drive)",
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        help="of training, in each run (default: 24, or as many as 18 seconds allow)",
    )
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="memory for parameters, gradients and optimizer states, such as 32MiB (default: a "
        "fifth of parameters and states)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="what to train on (default: the source of Python's standard library)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration; return 0 if losses and parameters are equal within the budget."""
    # Threads of OpenMP that spin while they wait keep a core from the transfers, and on a machine
    # that does other things as well, from each other. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from tensorspill.demo.show import show

    return show(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
