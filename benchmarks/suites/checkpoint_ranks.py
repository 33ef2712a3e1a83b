"""Several ranks that save one replicated state: what each writes, and how fast they are."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.report import SuiteReport
from benchmarks.rows import Row, at_most, figure
from benchmarks.setting import Setting
from tensorspill import checkpoint

__all__ = ["run"]

TENSORS = 64
SIZES = (2, 4)


def run(setting: Setting) -> SuiteReport:
    """Save on two and four ranks, and look into the files."""
    nbytes = setting.sizes.large
    rows: list[Row] = []
    for size in SIZES:
        setting.tick(f"{size} ranks")
        root = setting.folder / f"ranks{size}"
        seconds, shares = _job(size, nbytes, root, setting.rounds)
        written = _written(Path(checkpoint.latest(root) or ""))
        extra = sum(written) - nbytes
        rows += [
            figure("ranks", f"{size} ranks: bytes written twice", extra, "bytes", at_most(0)),
            figure(
                *("ranks", f"{size} ranks: largest less smallest share"),
                *(max(written) - min(written), "bytes", at_most(checkpoint.Limits().min_chunk)),
            ),
            figure("ranks", f"{size} ranks: rate together", nbytes / seconds / 1e9, "GB/s"),
        ]
        shutil.rmtree(root)
        del shares
    return SuiteReport(rows, [f"{nbytes} bytes in {TENSORS} tensors, on each rank in full"])


def _job(size: int, nbytes: int, root: Path, rounds: int) -> tuple[float, list[int]]:
    """Return the median of seconds of saves after the first, and the ranks' shares."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    meeting = root.with_suffix(".store")
    ranks = [
        context.Process(target=_rank, args=(r, size, nbytes, root, meeting, rounds, answers))
        for r in range(size)
    ]
    for rank in ranks:
        rank.start()
    try:
        found: tuple[float, list[int]] = answers.get(timeout=300)
        for rank in ranks:
            rank.join(60)
    finally:
        for rank in ranks:
            rank.kill()
    return found


def _rank(
    rank: int, size: int, nbytes: int, root: Path, meeting: Path, rounds: int, answers: Any
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        *("gloo", f"file://{meeting}", timedelta(seconds=120)), world_size=size, rank=rank
    )
    torch.manual_seed(0)
    numbers = nbytes // TENSORS // 4
    state = {f"layer{i}.weight": torch.randn(numbers // 256, 256) for i in range(TENSORS)}
    seconds = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        record = checkpoint.save(state, root, replicated=["*"], keep=1)
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        after = sorted(seconds[1:])
        answers.put((after[len(after) // 2], list(record.shares)))
    dist.destroy_process_group()


def _written(folder: Path) -> list[int]:
    """Return the bytes of tensors in each file, from the headers of the files."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        ranges = [item["data_offsets"] for name, item in head.items() if name != "__metadata__"]
        found.append(sum(end - begin for begin, end in ranges))
    return found
