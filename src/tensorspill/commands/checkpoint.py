"""``tensorspill checkpoint``: list, verify, show, export and compare checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorspill.checkpoint.tools.exporting import Exported

__all__ = ["HELP", "add_arguments", "run"]

HELP = "list, verify, show, export and compare checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _action(actions, "ls", _ls, "list the checkpoints of a folder", path="the folder")
    _action(actions, "verify", _verify, "read all of a checkpoint and check its digests")
    _action(actions, "show", _show, "show the tensors, objects and files of a checkpoint")
    export = _action(actions, "export", _export, "write a checkpoint in a form that others read")
    add = export.add_argument
    add("--to", required=True, metavar="PATH", help="folder (safetensors) or file (torch)")
    add("--format", choices=("safetensors", "torch"), default="safetensors", help="which form")
    add("--select", metavar="KEY", help="take what is below this key of the state, such as model")
    add("--shard", default="5GB", metavar="BYTES", help="size of each safetensors file (5GB)")
    diff = _action(actions, "diff", _diff, "say what is different between two checkpoints")
    diff.add_argument("other", metavar="OTHER", help="the second one")


def _action(
    actions: Any, name: str, function: Any, text: str, path: str | None = None
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    what = path or "a checkpoint, or a folder of them, of which the latest is taken"
    parser.add_argument("path", metavar="PATH", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.set_defaults(action=function)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for; return 1 if `verify` or `diff` found something, else 0."""
    found, status = arguments.action(arguments)
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")
    return int(status)


def _ls(arguments: argparse.Namespace) -> tuple[Any, int]:
    from tensorspill.checkpoint.tools.listing import list_checkpoints

    listing = list_checkpoints(arguments.path)
    if not arguments.json:
        from tensorspill.commands.checkpoint_text import show_listing

        show_listing(listing)
    return _plain(listing), 0


def _verify(arguments: argparse.Namespace) -> tuple[Any, int]:
    from tensorspill.checkpoint.tools.finding import checkpoint_at
    from tensorspill.checkpoint.tools.verifying import verify

    folder = checkpoint_at(arguments.path)
    if arguments.json:
        found = verify(folder)
    else:
        from tensorspill.commands.checkpoint_text import progress, show_verification

        with progress("checking") as advance:
            found = verify(folder, advance)
        show_verification(found)
    return _plain(found), bool(found.problems)


def _show(arguments: argparse.Namespace) -> tuple[Any, int]:
    from tensorspill.checkpoint.files.opened import read_manifest
    from tensorspill.checkpoint.tools.finding import checkpoint_at

    folder = checkpoint_at(arguments.path)
    manifest = read_manifest(folder)
    if not arguments.json:
        from tensorspill.commands.checkpoint_text import show_manifest

        show_manifest(folder, manifest)
        return None, 0
    return {
        "checkpoint": folder,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "nbytes": manifest.nbytes,
        "plan_digest": manifest.plan_digest,
        "versions": dict(manifest.versions),
        "files": [{"name": file.name, "nbytes": file.nbytes} for file in manifest.files],
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": tensor.shape,
                "nbytes": tensor.nbytes,
                "parts": [
                    {
                        "offsets": box.box.offsets,
                        "lengths": box.box.lengths,
                        "file": box.file,
                        "offset": box.offset,
                        "nbytes": box.nbytes,
                    }
                    for box in tensor.boxes
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
        "objects": {name: {"nbytes": item.nbytes} for name, item in manifest.objects.items()},
    }, 0


def _export(arguments: argparse.Namespace) -> tuple[Any, int]:
    from tensorspill.checkpoint.files.reading import Reader
    from tensorspill.checkpoint.tools.finding import checkpoint_at

    with Reader(checkpoint_at(arguments.path)) as reader:
        found: Exported
        if arguments.format == "torch":
            from tensorspill.checkpoint.tools.torch_file import export_torch

            found = export_torch(reader, arguments.to, select=arguments.select)
        else:
            from tensorspill.checkpoint.tools.exporting import export_safetensors

            found = export_safetensors(
                reader, arguments.to, select=arguments.select, shard_bytes=arguments.shard
            )
    if not arguments.json:
        from tensorspill.commands.checkpoint_text import show_export

        show_export(found)
    return _plain(found), 0


def _diff(arguments: argparse.Namespace) -> tuple[Any, int]:
    from tensorspill.checkpoint.tools.comparing import compare
    from tensorspill.checkpoint.tools.finding import checkpoint_at

    found = compare(checkpoint_at(arguments.path), checkpoint_at(arguments.other))
    if not arguments.json:
        from tensorspill.commands.checkpoint_text import show_comparison

        show_comparison(found)
    return _plain(found), bool(found.differences)


def _plain(record: Any) -> Any:
    """Return a frozen record as JSON values; numbers that JSON has not as text."""
    import dataclasses
    import math

    if dataclasses.is_dataclass(record):
        names = (field.name for field in dataclasses.fields(record))
        return {name: _plain(getattr(record, name)) for name in names}
    if isinstance(record, tuple):
        return [_plain(each) for each in record]
    if isinstance(record, float) and not math.isfinite(record):
        return str(record)
    return record
