"""What ``tensorspill checkpoint`` says on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from tensorspill.pool.sizes import format_bytes

if TYPE_CHECKING:
    from tensorspill.checkpoint.files.manifest import Manifest
    from tensorspill.checkpoint.tools.comparing import Comparison
    from tensorspill.checkpoint.tools.exporting import Exported
    from tensorspill.checkpoint.tools.listing import Listing
    from tensorspill.checkpoint.tools.verifying import Verification

__all__ = [
    "progress",
    "show_comparison",
    "show_export",
    "show_listing",
    "show_manifest",
    "show_verification",
]


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far something is, on standard error."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_listing(listing: Listing) -> None:
    """Show a folder of checkpoints."""
    console = Console(highlight=False)
    table = _table("checkpoint", "step", "tensors", "objects", "files", "size", "")
    for entry in listing.checkpoints:
        step = "" if entry.step is None else str(entry.step)
        counts = map(str, (entry.tensors, entry.objects, entry.files))
        mark = escape(entry.problem) if entry.problem else "latest" if entry.latest else ""
        table.add_row(escape(entry.name), step, *counts, format_bytes(entry.nbytes), mark)
    console.print(table if listing.checkpoints else f"No checkpoints in {escape(listing.root)}")
    for name in listing.leftovers:
        console.print(f"{escape(name)}: being saved, or left by a save that failed")
    if listing.problem:
        console.print(escape(listing.problem))


def show_verification(found: Verification) -> None:
    """Show what a verification found."""
    console = Console(highlight=False)
    rate = found.nbytes / found.seconds / 1e9 if found.seconds else 0.0
    console.print(
        f"{escape(found.checkpoint)}: {found.tensors} tensors and {found.objects} objects in "
        f"{found.files} files, {format_bytes(found.nbytes)} in {found.seconds:.2f} s "
        f"({rate:.2f} GB/s)"
    )
    for problem in found.problems:
        place = "" if problem.offset is None else f" at {problem.offset}, {problem.nbytes} bytes"
        console.print(escape(f"{problem.path}{place}: {problem.what}"))
    count = len(found.problems)
    console.print(f"{count} problem{'s' * (count != 1)}" if count else "All as it was written")


def show_manifest(folder: str, manifest: Manifest) -> None:
    """Show what is in a checkpoint."""
    console = Console(highlight=False)
    step = "" if manifest.step is None else f", step {manifest.step}"
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    console.print(escape(f"{folder}{step}: {format_bytes(manifest.nbytes)}, written by {versions}"))
    table = _table("tensor", "dtype", "shape", "size", "parts", "files")
    for name, tensor in manifest.tensors.items():
        files = sorted({part.file for part in tensor.boxes})
        shown = files[0] if len(files) == 1 else f"{len(files)} files" if files else ""
        table.add_row(
            escape(name),
            str(tensor.dtype).removeprefix("torch."),
            " x ".join(map(str, tensor.shape)) or "scalar",
            format_bytes(tensor.nbytes),
            str(len(tensor.boxes)),
            escape(shown),
        )
    console.print(table)
    for name, item in manifest.objects.items():
        console.print(escape(f"object {name}: {format_bytes(item.nbytes)} in {item.file}"))


def show_export(found: Exported) -> None:
    """Show what an export wrote."""
    console = Console(highlight=False)
    console.print(f"{found.tensors} tensors, {format_bytes(found.nbytes)}:")
    for path in found.files:
        console.print(escape(path))
    for name in found.skipped:
        console.print(escape(f"left out: object {name}"))


def show_comparison(found: Comparison) -> None:
    """Show what is different between two checkpoints."""
    console = Console(highlight=False)
    if found.differences:
        table = _table("name", "difference", "", "largest")
        for each in found.differences:
            largest = "" if each.largest is None else f"{each.largest:.3g}"
            table.add_row(escape(each.name), each.kind, escape(each.detail), largest)
        console.print(table)
    console.print(
        f"{found.equal} equal ({found.by_digest} by their digests), "
        f"{len(found.differences)} different"
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in columns:
        right = name in ("step", "tensors", "objects", "files", "size", "parts", "largest")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table
