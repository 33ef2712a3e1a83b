"""Staging that is right while several streams compute on, and move, their own tensors."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from benchmarks.gpu.check import MIB, Check
from benchmarks.rows import Row, Verdict
from tensorspill.spill.file import SpillFile

__all__ = ["run"]

_THREADS, _TURNS = 4, 12
_SIZES = (1, 4097, 1 * MIB + 3, 8 * MIB)


def run(check: Check) -> tuple[list[Row], list[str]]:
    """Let threads put and get on streams of their own, with work queued before and after."""
    wrong: list[str] = []
    moved = [0] * _THREADS
    with SpillFile(check.folder, device=check.device, backend="aio", verify=True) as spill:
        threads = [
            threading.Thread(target=_turns, args=(check, spill, index, wrong, moved))
            for index in range(_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    verdict = Verdict.NOT_MET if wrong else Verdict.MET
    row = Row("streams", f"{_THREADS} streams", sum(moved) / MIB, "MiB moved", verdict=verdict)
    return [row], wrong[:10]


def _turns(check: Check, spill: SpillFile, index: int, wrong: list[str], moved: list[int]) -> None:
    try:
        with _stream(check):
            for turn in range(_TURNS):
                moved[index] += _turn(check, spill, index, turn, wrong)
                if check.left < 10:
                    break
    except Exception as error:
        wrong.append(f"stream {index}: {type(error).__name__}: {error}")


def _turn(check: Check, spill: SpillFile, index: int, turn: int, wrong: list[str]) -> int:
    """Compute, put without waiting for the GPU, overwrite, get, and compute on."""
    tensors = {
        f"{index} {size}": torch.full((max(size // check.scale, 1),), 0, dtype=torch.uint8,
                                      device=check.device)
        for size in _SIZES
    }  # fmt: skip
    for number, tensor in enumerate(tensors.values()):
        # Queued, and perhaps not begun, when the put is called.
        for _ in range(20):
            tensor.add_(1)
        tensor.add_(turn + index + number)
    spill.put(tensors).result()
    for tensor in tensors.values():
        tensor.fill_(0xA5)
    transfer = spill.get(tensors)
    transfer.result()
    for number, (name, tensor) in enumerate(tensors.items()):
        expected = (20 + turn + index + number) % 256
        if not bool((tensor == expected).all()):
            wrong.append(f"stream {index}, turn {turn}: {name} is wrong")
    return 2 * sum(tensor.nbytes for tensor in tensors.values())


def _stream(check: Check) -> Any:
    if check.device.type != "cuda":
        return contextlib.nullcontext()
    make: Any = torch.cuda.Stream
    return torch.cuda.stream(make(check.device))
