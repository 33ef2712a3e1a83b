"""Staging against kvikio's compatibility mode, and against torch's own copy with our host path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.check import MIB, Check, NotMeasured, cut_rounds
from benchmarks.gpu.movers import Mover, engine_mover, kvikio_mover, torch_mover
from benchmarks.gpu.pieces import no_kvikio
from benchmarks.rows import Bound, Compared, Row, at_least
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import cut as cut_bytes
from tensorspill.profiling.files import written_file
from tensorspill.profiling.page_cache import CacheWatch, drop_pages
from tensorspill.profiling.rounds import Case, Results

__all__ = ["direct", "staged"]

_LARGE = (64 * MIB, 256 * MIB, 1024 * MIB)
_MANY, _EACH = 2000, 256 << 10
_THREADS = 8
_POISON = 0xA5
#: For each way and size.
_SECONDS = 8.0

Moving = tuple[ExitStack, torch.Tensor, torch.Tensor, Path]


def staged(check: Check) -> tuple[list[Row], list[str]]:
    """Measure the host path: single tensors, and a batch of small ones."""
    rows: list[Row] = []
    notes: list[str] = []
    sizes = [(f"{size >> 20} MiB", 1, check.size(size), at_least(1.1)) for size in _LARGE]
    many = max(1, _MANY // check.scale)
    # Before the largest, should time run out.
    sizes.insert(2, (f"{_MANY:,} x 256 KiB", many, _EACH, at_least(2.0)))
    for name, count, each, bound in sizes:
        if check.left < 15:
            notes.append(f"{name} and what would follow: no time was left")
            break
        rows += _compare(check, name, count, each, bound, notes)
    if not rows:
        raise NotMeasured("no time was left")
    return rows, notes


def direct(check: Check) -> tuple[list[Row], list[str]]:
    """Measure GPUDirect Storage against staging, on a folder where it works."""
    from tensorspill.gds.evidence import find

    folder = check.gds or check.folder
    found = find(folder, check.device.index or 0)
    if not found.works:
        raise NotMeasured(found.why)
    rows: list[Row] = []
    notes = [found.why]
    sizes = (("256 MiB", 1, check.size(256 * MIB)), (f"{_MANY:,} x 256 KiB", _MANY, _EACH))
    for name, count, each in sizes:
        with _moving(check, count * each) as (stack, whole, expected, path):
            cut = cut_bytes(whole, each)
            movers = {
                "GPUDirect Storage": engine_mover(check, stack, path, cut, "gds"),
                "staged": engine_mover(check, stack, path, cut, "aio"),
            }
            for way, results in _measured(check, movers, whole, expected, path, CacheWatch()):
                compared = Compared("gds", results)
                rows.append(compared.row("GPUDirect Storage", "staged", name=f"{way}, {name}"))
    return rows, notes


def _compare(
    check: Check, name: str, count: int, each: int, bound: Bound, notes: list[str]
) -> list[Row]:
    rows: list[Row] = []
    watch = CacheWatch()
    with _moving(check, count * each) as (stack, whole, expected, path):
        cut = cut_bytes(whole, each)
        movers: dict[str, Mover] = {
            "staged": engine_mover(check, stack, path, cut, "aio"),
            "staged again": engine_mover(check, stack, path, cut, "aio"),
            "torch and host path": torch_mover(check, stack, path, cut),
        }
        if why := no_kvikio(check):
            notes.append(f"kvikio: {why}")
        else:
            try:
                movers[_kvikio(_THREADS)] = kvikio_mover(check, stack, path, cut, _THREADS)
                movers[_kvikio(_THREADS)].write()
            except RuntimeError as error:
                movers.pop(_kvikio(_THREADS), None)
                notes.append(f"kvikio: {error}")
        for way, results in _measured(check, movers, whole, expected, path, watch):
            # Where kvikio can't be used, its column is there and empty.
            results.samples.setdefault(_kvikio(_THREADS), [None] * len(results.samples["staged"]))
            compared = Compared("staging", results, twins=("staged", "staged again"))
            case = f"{way}, {name}"
            rows.append(compared.row("staged", _kvikio(_THREADS), bound, name=case))
            rows.append(compared.row("staged", "torch and host path", name=case))
    notes += [f"{name}: {note}" for note in watch.notes()]
    return rows


@contextmanager
def _moving(check: Check, nbytes: int) -> Iterator[Moving]:
    """Provide memory on the device, a copy of its content, and a file that was written before."""
    whole = torch.randint(256, (nbytes,), dtype=torch.uint8, device=check.device)
    path = written_file(check.folder / f"gpu-{nbytes}.dat", nbytes)
    try:
        with ExitStack() as stack:
            yield stack, whole, whole.clone(), path
    finally:
        path.unlink()
        if check.device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(
    check: Check,
    movers: dict[str, Mover],
    whole: torch.Tensor,
    expected: torch.Tensor,
    path: Path,
    watch: CacheWatch,
) -> Iterator[tuple[str, Results]]:
    """Measure writing, then reading, of each mover; every read is compared."""
    for way in ("write", "read"):
        cases: dict[str, Case] = {
            name: partial(_write, check, mover, whole, expected, path)
            if way == "write"
            else partial(_read, check, mover, whole, expected, path, watch)
            for name, mover in movers.items()
        }
        for case in cases.values():
            case()  # threads, page-locked memory and the like are there from now on
        yield way, cut_rounds(cases, check, _SECONDS)


def _write(
    check: Check, mover: Mover, whole: torch.Tensor, expected: torch.Tensor, path: Path
) -> Sample:
    # Fresh content: what was there before would hide bytes that were not written.
    expected.add_(1)
    whole.copy_(expected)
    check.synchronize()
    sample = timed(mover.write, whole.nbytes)
    _check_file(path, expected)
    return sample


def _read(
    check: Check,
    mover: Mover,
    whole: torch.Tensor,
    expected: torch.Tensor,
    path: Path,
    watch: CacheWatch,
) -> Sample:
    drop_pages(path)
    watch.look(path)
    whole.fill_(_POISON)
    check.synchronize()
    sample = timed(mover.read, whole.nbytes)
    if not torch.equal(whole, expected):
        raise RuntimeError("what was read is not what was written")
    return sample


def _check_file(path: Path, expected: torch.Tensor) -> None:
    """Read some places by another way."""
    step = max(1, expected.numel() // 64)
    with path.open("rb", buffering=0) as file:
        for at in range(0, expected.numel(), step):
            part = expected[at : at + 4096].cpu().numpy().tobytes()
            file.seek(at)
            if file.read(len(part)) != part:
                raise RuntimeError("what was written is not what was in memory")


def _kvikio(threads: int) -> str:
    return f"kvikio, compatibility mode, {threads} threads"
