"""The swapper against the spill file, for the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from benchmarks.files import prewrite_spill
from benchmarks.own import BLOCK, DEPTH, Mover, read, spill_mover, write
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, Row, at_least
from benchmarks.setting import Setting
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import (
    check_same,
    cut,
    ordinary_tensor,
    page_aligned,
    poison,
    randomize,
    refresh,
)
from tensorspill.profiling.page_cache import CacheWatch
from tensorspill.profiling.rounds import Case, Results, run_rounds
from tensorspill.spill.file import SpillFile
from tensorspill.swap.swapper import ParameterSwapper

__all__ = ["run"]

MIB = 1 << 20

Tensors = list[torch.Tensor]


def run(setting: Setting) -> SuiteReport:
    """Measure out, in, and into outside memory, all at once and one by one."""
    count, each = setting.sizes.swapped, setting.sizes.swapped_bytes
    capacity = 3 * count * (each + 8192) + 8 * MIB
    options: dict[str, Any] = {"capacity": capacity, "block_bytes": BLOCK, "depth": DEPTH}
    watch = CacheWatch()
    with ExitStack() as stack:
        spill = stack.enter_context(SpillFile(setting.folder, **options))
        prewrite_spill(spill)
        bench = Bench(setting, count, each)
        stack.enter_context(bench.open(options))
        aligned = {f"t{i}": t for i, t in enumerate(cut(page_aligned(count * each), each))}
        outside = dict(zip(aligned, bench.outside, strict=True))
        spilled, to_outside = spill_mover(spill, aligned), spill_mover(spill, outside)
        for mover in (to_outside, spilled):
            _fill(mover.tensors, bench.content)
            mover.write()
        out = run_rounds(_out_cases(bench, spilled), setting.rounds, setting.chance, setting.tick)
        for mover in (to_outside, spilled):
            _fill(mover.tensors, bench.content)
            mover.write()
        bench.store()
        cases = _in_cases(bench, spill, spilled, to_outside, watch)
        back = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
    return SuiteReport(_rows(out, back, count, each), watch.notes(), {"out": out, "in": back})


class Bench:
    """A swapper with parameters, and what they should hold.

    Attributes
    ----------
    content : list of torch.Tensor
        What is stored, as bytes.
    outside : list of torch.Tensor
        Ordinary memory for as many bytes.
    """

    def __init__(self, setting: Setting, count: int, each: int) -> None:
        self.setting = setting
        self.count, self.each = count, each
        self.content = [torch.empty(each, dtype=torch.uint8) for _ in range(count)]
        for tensor in self.content:
            randomize(tensor)
        self.outside = [ordinary_tensor(each) for _ in range(count)]
        self.swapper: ParameterSwapper
        self.params: list[torch.nn.Parameter] = []

    def open(self, options: dict[str, Any]) -> ParameterSwapper:
        """Open the swapper, with a budget for all parameters, and give it its parameters."""
        budget = self.count * (self.each + 4096)
        self.swapper = ParameterSwapper(self.setting.folder, torch.bfloat16, budget, **options)
        prewrite_spill(self.swapper.file)
        self.params = [
            torch.nn.Parameter(tensor.clone().view(torch.bfloat16), requires_grad=False)
            for tensor in self.content
        ]
        self.swapper.swap_out(self.params)
        return self.swapper

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return self.count * self.each

    def store(self) -> None:
        """Let the swapper hold `content`, in no buffer."""
        self.fetch()
        for param, tensor in zip(self.params, self.content, strict=True):
            param.data.view(torch.uint8).copy_(tensor)
        self.swapper.swap_out(self.params)

    def fetch(self) -> None:
        """Bring all parameters to memory."""
        self.swapper.swap_in(self.params, wait=True)

    def swap_out(self) -> Sample:
        """Time writing fresh content, and let go of the buffers."""
        self.fetch()
        tensors = [param.data.view(torch.uint8) for param in self.params]
        for tensor in tensors:
            refresh(tensor)
        copies = [tensor.clone() for tensor in tensors]
        sample = timed(lambda: self.swapper.swap_out(self.params), self.nbytes, self.setting.idle)
        self.fetch()
        _check([param.data.view(torch.uint8) for param in self.params], copies)
        self.swapper.release(self.params)
        return sample

    def swap_in(self, watch: CacheWatch) -> Sample:
        """Time reading into the pool's buffers, and let go of these."""
        self._look(watch)
        sample = timed(self.fetch, self.nbytes, self.setting.idle)
        _check([param.data.view(torch.uint8) for param in self.params], self.content)
        self.swapper.release(self.params)
        return sample

    def swap_into(self, watch: CacheWatch, together: bool) -> Sample:
        """Time reading into memory that is not the swapper's, all at once or one by one."""
        for tensor in self.outside:
            poison(tensor)
        self._look(watch)
        sample = timed(partial(self._into, together), self.nbytes, self.setting.idle)
        _check(self.outside, self.content)
        return sample

    def _into(self, together: bool) -> None:
        destinations = [tensor.view(torch.bfloat16) for tensor in self.outside]
        pairs = zip(self.params, destinations, strict=True)
        if together:
            for transfer in [self.swapper.swap_into(p, d, wait=False) for p, d in pairs]:
                transfer.result()
        else:
            for param, destination in pairs:
                self.swapper.swap_into(param, destination)

    def _look(self, watch: CacheWatch) -> None:
        watch.look(self.swapper.location(self.params[0])[0].path)


def _out_cases(bench: Bench, spilled: Mover) -> dict[str, Case]:
    return {
        "spill file": partial(write, spilled, bench.setting),
        "spill file again": partial(write, spilled, bench.setting),
        "swapper": bench.swap_out,
    }


def _in_cases(
    bench: Bench, spill: SpillFile, spilled: Mover, to_outside: Mover, watch: CacheWatch
) -> dict[str, Case]:
    """Return reads; those one by one are compared with single gets."""

    def one_by_one() -> None:
        for i, tensor in enumerate(to_outside.tensors):
            spill.get({f"t{i}": tensor}).result()

    single = Mover(to_outside.tensors, one_by_one, one_by_one, to_outside.places)

    def get(mover: Mover) -> Case:
        return partial(read, mover, bench.content, bench.setting, watch)

    return {
        "spill file": get(spilled),
        "spill file again": get(spilled),
        "spill file, one by one": get(single),
        "swapper": partial(bench.swap_in, watch),
        "swapper, outside": partial(bench.swap_into, watch, True),
        "swapper, outside, one by one": partial(bench.swap_into, watch, False),
    }


def _rows(out: Results, back: Results, count: int, each: int) -> list[Row]:
    twins = ("spill file", "spill file again")
    what = f"{count} x {each >> 20} MiB"
    outward, inward = (Compared("swapper", results, twins=twins) for results in (out, back))
    return [
        outward.row("swapper", "spill file", at_least(0.9), name=f"out, {what}"),
        inward.row("swapper", "spill file", at_least(0.9), name=f"in, {what}"),
        inward.row(
            "swapper, outside", "spill file", at_least(0.8), name="into outside memory, at once"
        ),
        inward.row(
            "swapper, outside, one by one",
            "spill file, one by one",
            at_least(0.8),
            name="into outside memory, one by one",
        ),
        inward.row(
            "swapper, outside, one by one", "spill file", name="into outside memory, one by one"
        ),
    ]


def _fill(tensors: Sequence[torch.Tensor], content: Tensors) -> None:
    for tensor, part in zip(tensors, content, strict=True):
        tensor.copy_(part)


def _check(found: Tensors, expected: Tensors) -> None:
    for number, (tensor, wanted) in enumerate(zip(found, expected, strict=True)):
        check_same(tensor, wanted, f"parameter {number}")
