"""Opening and closing everything again and again: what of it stays behind."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.own import file_mover, open_measured
from benchmarks.processes import holdings
from benchmarks.report import SuiteReport
from benchmarks.rows import at_most, figure
from benchmarks.setting import Setting
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.profiling.content import ordinary_tensor
from tensorspill.spill.file import SpillFile

__all__ = ["run"]

MIB = 1 << 20

#: Cycles under way at a time.
TOGETHER = 4

#: Growth of resident memory over all cycles that counts as flat: what an allocator may keep.
FLAT = 4.0


def run(setting: Setting) -> SuiteReport:
    """Cycle a while, then look how much more there is after many more cycles."""
    cycles = setting.sizes.cycles
    # Closing a context waits for the kernel, which serves several as soon as one.
    with ThreadPoolExecutor(TOGETHER) as threads:
        cycle = partial(_cycle, setting)
        list(threads.map(cycle, range(max(TOGETHER, 3 * cycles // 10))))
        gc.collect()
        before, begun = holdings(), time.perf_counter()
        list(threads.map(cycle, range(cycles)))
        seconds = time.perf_counter() - begun
        gc.collect()
        grown = holdings().since(before)
    what = f"after {cycles:,} cycles"
    return SuiteReport(
        [
            figure(
                "cycles", f"resident memory more {what}", grown.resident / MIB, "MiB", at_most(FLAT)
            ),
            figure("cycles", f"addresses more {what}", grown.mapped / MIB, "MiB", at_most(FLAT)),
            figure("cycles", f"descriptors more {what}", grown.descriptors, "", at_most(0)),
            figure("cycles", f"threads more {what}", grown.threads, "", at_most(0)),
            figure("cycles", f"AIO contexts more {what}", grown.contexts, "", at_most(0)),
            figure(
                "cycles",
                "one cycle",
                seconds / cycles * 1e3,
                "ms",
                note=f"pool, engine and spill file opened, used and closed, {TOGETHER} at a time",
            ),
        ]
    )


def _cycle(setting: Setting, number: int) -> None:
    tensor = ordinary_tensor(256 << 10)
    name = f"cycle{number % (2 * TOGETHER)}.dat"
    with (
        BufferPool(MIB) as pool,
        pool.allocate(tensor.nbytes) as buffer,
        open_measured(setting.folder) as engine,
        engine.open(name, "w", MIB) as file,
    ):
        # Staged one way and direct the other.
        file_mover(engine, file, [tensor], [0]).write()
        file_mover(engine, file, [buffer.tensor], [0]).read()
    with SpillFile(setting.folder, capacity=MIB) as spill:
        spill.put({"tensor": tensor}).result()
        spill.get({"tensor": tensor}).result()
