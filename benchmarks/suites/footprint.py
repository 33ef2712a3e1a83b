"""Memory that is reserved, against what was asked for."""

from __future__ import annotations

import gc

from benchmarks.own import file_mover, open_measured
from benchmarks.processes import holdings
from benchmarks.report import SuiteReport
from benchmarks.rows import Row, at_most, figure
from benchmarks.setting import Setting
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.sizes import format_bytes
from tensorspill.profiling.content import ordinary_tensor
from tensorspill.profiling.files import written_file

__all__ = ["run"]

#: Bytes of the transfer that makes an engine allocate its staging.
STAGED = 32 << 20


def run(setting: Setting) -> SuiteReport:
    """Measure a pool, and an engine that stages."""
    _warm_up(setting)
    return SuiteReport([*_pool(setting.sizes.reserved), _engine(setting)])


def _pool(asked: int) -> list[Row]:
    """Use all of a pool and see what the process has grown by."""
    gc.collect()
    before = holdings()
    with BufferPool(asked) as pool:
        with pool.allocate(asked) as buffer:
            buffer.tensor.fill_(1)
            grown = holdings().since(before)
        locked = pool.slab.page_locked
    what = f"pool of {format_bytes(asked)}"
    note = "page-locked by CUDA" if locked else "pageable, there is no CUDA driver"
    return [
        figure(
            "memory", f"{what}, resident / asked", grown.resident / asked, "", at_most(1.02), note
        ),
        figure("memory", f"{what}, addresses / asked", grown.mapped / asked, "", at_most(1.02)),
    ]


def _engine(setting: Setting) -> Row:
    """Stage transfers of a pool's memory, and compare with what was asked for and reported."""
    asked = setting.sizes.reserved
    gc.collect()
    before = holdings()
    with (
        BufferPool(asked) as pool,
        pool.allocate(asked) as buffer,
        open_measured(setting.folder) as engine,
        engine.open("memory.dat", "r+") as file,
    ):
        buffer.tensor.fill_(1)
        mover = file_mover(engine, file, [buffer.tensor[13:STAGED]], [0])
        mover.write()
        mover.read()
        reported = engine.statistics().staging_bytes
        grown = holdings().since(before)
    return figure(
        "memory",
        "pool and engine, resident / (asked + staging reported)",
        grown.resident / (asked + reported),
        "",
        at_most(1.02),
        f"staging of {format_bytes(reported)}",
    )


def _warm_up(setting: Setting) -> None:
    """Load compiled code first, which stays."""
    path = written_file(setting.folder / "memory.dat", STAGED)
    with open_measured(setting.folder) as engine, engine.open(path.name, "r+") as file:
        file_mover(engine, file, [ordinary_tensor(1 << 20)], [0]).write()
