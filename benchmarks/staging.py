"""How many staging blocks a ring needs to keep the drive busy while it copies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.constants import constant
from benchmarks.own import file_mover, open_measured, read, write
from benchmarks.setting import Setting
from tensorspill.host_fallback import context
from tensorspill.profiling.content import ordinary_tensor, page_aligned, randomize
from tensorspill.profiling.files import written_file
from tensorspill.profiling.page_cache import CacheWatch
from tensorspill.profiling.rounds import Case, Results, run_rounds

__all__ = ["BLOCKS", "measure_staging"]

BLOCKS = (4, 8, 16, 32)


def measure_staging(
    setting: Setting, nbytes: int, counts: Sequence[int] = BLOCKS
) -> dict[str, Results]:
    """Return the results of writes and reads of one large ordinary tensor.

    Cases are the counts of blocks as text, and "direct": what needs no staging.
    """
    path = written_file(setting.folder / "staging.dat", nbytes)
    tensor, aligned, expected = (
        make(nbytes) for make in (ordinary_tensor, page_aligned, page_aligned)
    )
    randomize(expected)
    found: dict[str, Results] = {}
    with ExitStack() as stack:
        movers = {}
        for name, memory in [*((str(count), tensor) for count in counts), ("direct", aligned)]:
            engine = stack.enter_context(open_measured(setting.folder))
            mover = movers[name] = file_mover(engine, engine.open(path.name, "r+"), [memory], [0])
            memory.copy_(expected)
            # An engine allocates its staging with the first transfer that needs it.
            with constant(context, "STAGING_BLOCKS", int(name) if name.isdecimal() else 1):
                mover.write()
        for way in ("write", "read"):
            aligned.copy_(expected)
            movers["direct"].write()
            cases: dict[str, Case] = {
                name: partial(write, mover, setting)
                if way == "write"
                else partial(read, mover, [expected], setting, CacheWatch())
                for name, mover in movers.items()
            }
            found[way] = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
    return found
