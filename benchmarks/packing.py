"""Neighbours in a file moved one by one and packed, for many sizes and kinds of address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.constants import constant
from benchmarks.own import Mover, file_mover, open_measured, read, write
from benchmarks.setting import Setting
from tensorspill.engine import Engine, File
from tensorspill.host_fallback import segments
from tensorspill.profiling.clock import Sample
from tensorspill.profiling.content import cut, odd_tensor, page_aligned, randomize
from tensorspill.profiling.files import written_file
from tensorspill.profiling.page_cache import CacheWatch
from tensorspill.profiling.rounds import Case, Results, run_rounds

__all__ = ["KINDS", "SIZES", "Line", "crossing", "measure_packing"]

PAGE = 4096

#: Sizes of tensors: 4 KiB to 4 MiB.
SIZES = tuple(1 << power for power in range(12, 23))

#: What one by one means.
KINDS = {
    "direct": "page-aligned, straight from where they lie",
    "staged": "odd addresses, staged each for itself",
    "split": "odd addresses, in the file at the same residue: head, middle and tail",
}

_ONE_BY_ONE, _PACKED = 0, 1 << 40


@dataclass(frozen=True, slots=True)
class Line:
    """One size, moved one way.

    Attributes
    ----------
    kind : str
        See `KINDS`.
    way : str
        "write" or "read".
    nbytes : int
        Of each tensor.
    results : Results
        Of the cases "single", "packed" and "packed again".
    """

    kind: str
    way: str
    nbytes: int
    results: Results


def measure_packing(setting: Setting, sizes: Sequence[int], total: int) -> list[Line]:
    """Measure all kinds, ways and sizes.

    Parameters
    ----------
    setting : Setting
    sizes : sequence of int
        Bytes of a tensor, multiples of 4096.
    total : int
        Bytes of a batch.
    """
    path = written_file(setting.folder / "pack.dat", 2 * total + max(sizes))
    expected = page_aligned(total)
    randomize(expected)
    memories = {"direct": page_aligned(total), "staged": odd_tensor(total)}
    memories["split"] = memories["staged"]
    lines: list[Line] = []
    with open_measured(setting.folder) as engine:
        file = engine.open(path.name, "r+")
        # Heads and tails may only be padded where nobody else's bytes are beside them.
        file.exclusive = True
        for nbytes in sizes:
            for kind in KINDS:
                movers = _movers(engine, file, kind, memories[kind], nbytes)
                for way in ("write", "read"):
                    setting.tick(f"{kind}, {way}, {nbytes >> 10} KiB")
                    results = _compare(way, movers, expected, setting)
                    lines.append(Line(kind, way, nbytes, results))
    return lines


def crossing(lines: Sequence[Line], kind: str, way: str) -> int | None:
    """Return the smallest size from which on packing never wins; None if it wins at the largest."""
    found: int | None = None
    for line in sorted(lines, key=lambda line: -line.nbytes):
        if (line.kind, line.way) == (kind, way):
            gain = line.results.spread_of_ratios("packed", "single")
            if gain is None or gain.median > 1:
                break
            found = line.nbytes
    return found


def _movers(
    engine: Engine, file: File, kind: str, memory: torch.Tensor, nbytes: int
) -> dict[str, Mover]:
    """Return the same tensors one by one, and packed; each where it would lie in the file."""
    count = memory.nbytes // nbytes
    tensors = cut(memory[: count * nbytes], nbytes)
    residue = memory.data_ptr() % file.memory_alignment if kind == "split" else 0
    room = nbytes + (PAGE if residue else 0)
    apart, dense = ([i * step for i in range(count)] for step in (room, nbytes))
    return {
        "single": file_mover(engine, file, tensors, [at + residue for at in apart], prepared=True),
        "packed": file_mover(engine, file, tensors, dense, prepared=True),
    }


def _compare(
    way: str, movers: dict[str, Mover], expected: torch.Tensor, setting: Setting
) -> Results:
    tensors = movers["single"].tensors
    wanted = cut(expected[: len(tensors) * tensors[0].nbytes], tensors[0].nbytes)

    def case(name: str, limit: int) -> Case:
        return partial(_run, way, movers[name], limit, wanted, setting)

    return run_rounds(
        {
            "single": case("single", _ONE_BY_ONE),
            "packed": case("packed", _PACKED),
            "packed again": case("packed", _PACKED),
        },
        setting.rounds,
        setting.chance,
    )


def _run(
    way: str, mover: Mover, limit: int, wanted: Sequence[torch.Tensor], setting: Setting
) -> Sample:
    with constant(segments, "PACK_BELOW", limit):
        if way == "write":
            return write(mover, setting)
        # Both ways have the same places in the file.
        for tensor, content in zip(mover.tensors, wanted, strict=True):
            tensor.copy_(content)
        mover.write()
        return read(mover, wanted, setting, CacheWatch())
