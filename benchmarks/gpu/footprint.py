"""How much GPU memory moving and checking take beyond the tensors themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from benchmarks.gpu.check import MIB, Check, NotMeasured
from benchmarks.gpu.movers import engine_mover
from benchmarks.rows import Row, figure
from tensorspill.pool.kernels.digesting import begin_digests
from tensorspill.profiling.files import written_file

__all__ = ["run"]

_WHOLE = 256 * MIB
_OFTEN = 0.002


def run(check: Check) -> tuple[list[Row], list[str]]:
    """Watch the driver's count of free memory while the engine and the kernels work."""
    if check.device.type != "cuda":
        raise NotMeasured("there is no GPU memory")
    nbytes = check.size(_WHOLE)
    whole = torch.randint(256, (nbytes,), dtype=torch.uint8, device=check.device)
    path = written_file(check.folder / "footprint.dat", nbytes)
    rows: list[Row] = []
    try:
        for name, pieces in (("one tensor", 1), ("1,000 tensors", 1000)):
            parts = list(whole.tensor_split(pieces))
            with _watched(check) as peak, ExitStack() as stack:
                mover = engine_mover(check, stack, path, parts, "aio")
                mover.write()
                mover.read()
            rows.append(figure("memory", f"staging 256 MiB, {name}", peak[0] / MIB, "MiB"))
            with _watched(check) as peak:
                begin_digests(parts).values()
            rows.append(figure("memory", f"digest of 256 MiB, {name}", peak[0] / MIB, "MiB"))
    finally:
        path.unlink()
    return rows, ["what the driver had less of at the peak, contexts and kernels included"]


@contextmanager
def _watched(check: Check) -> Iterator[list[int]]:
    """Yield a list whose one number is, at the end, the most bytes that were taken meanwhile."""
    check.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(check.device)[0]
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], before - torch.cuda.mem_get_info(check.device)[0])
            time.sleep(_OFTEN)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak[0] = max(peak[0], before - torch.cuda.mem_get_info(check.device)[0])
