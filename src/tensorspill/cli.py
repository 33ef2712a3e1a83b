"""The command line: one module for each command, imported when it is used."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import NoReturn

from tensorspill import __version__
from tensorspill.errors import SpillError

__all__ = ["main"]

#: Command → the module with its ``HELP``, ``add_arguments(parser)`` and ``run(arguments) -> int``.
#: Importing such a module must be cheap: it happens for every ``tensorspill --help``.
COMMANDS = {
    "bench": "tensorspill.commands.bench",
    "checkpoint": "tensorspill.commands.checkpoint",
    "compare": "tensorspill.commands.compare",
    "demo": "tensorspill.demo.command",
    "doctor": "tensorspill.commands.doctor",
    "plan": "tensorspill.commands.plan",
    "report": "tensorspill.commands.report",
    "sweep": "tensorspill.commands.sweep",
    "topo": "tensorspill.commands.topo",
    "tune": "tensorspill.commands.tune",
}

_FAILED = 3
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM
_PIPE_CLOSED = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Returns
    -------
    int
        0 if all went well; 1 if the command says that something isn't as it should be; 2 for a
        wrong command line; 3 for an error, which is printed to standard error; 128 + n after
        signal n.
    """
    arguments = _parser().parse_args(argv)
    command: ModuleType = arguments.command
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        status: int = command.run(arguments)
        sys.stdout.flush()
    except SpillError as error:
        print(f"tensorspill: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("tensorspill: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Who read our output has gone; nothing must be flushed to them at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    finally:
        signal.signal(signal.SIGTERM, previous)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensorspill",
        description="Move tensors between GPU or host memory and NVMe at the speed of the drives.",
    )
    parser.add_argument("--version", action="version", version=f"tensorspill {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, where in COMMANDS.items():
        module = importlib.import_module(where)
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        command.set_defaults(command=module)
        module.add_arguments(command)
    return parser


def _terminate(_signum: int, _frame: FrameType | None) -> NoReturn:
    """Turn SIGTERM into an exception, so that files are cleaned up."""
    raise SystemExit(_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
