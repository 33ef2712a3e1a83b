"""Measuring one point: rounds of one setting, each with fresh content, checked and timed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from tensorspill.engine import Batch, EngineStatistics, PathStatistics, Request
from tensorspill.engine.latencies import Latencies
from tensorspill.opening import open_engine
from tensorspill.profiling.ceilings import Ceiling, per_cent, tightest
from tensorspill.profiling.clock import Sample
from tensorspill.profiling.content import refresh
from tensorspill.profiling.files import check_written
from tensorspill.profiling.host import commit, host, now
from tensorspill.profiling.memory import Memory, open_memory
from tensorspill.profiling.page_cache import drop_pages
from tensorspill.profiling.points import Point
from tensorspill.profiling.rows import NOT_MEASURED, Row
from tensorspill.profiling.site import NAME, Site

__all__ = ["Measuring", "Round", "not_measured"]

#: Bytes of the transfer that starts threads and loads compiled code before anything is timed.
_WARM = 16 << 20
#: Paths of all engines on which bytes are in the page cache; of the edges of a range only writes.
_CACHED = frozenset({"buffered", "refused"})


@dataclass(frozen=True, slots=True)
class Round(Sample):
    """What one round took; `seconds` and `nbytes` are of all.

    Attributes
    ----------
    first_seconds, first_nbytes : float, int
        Until the first transfer had ended, and the bytes that had been moved by then.
    dropped : bool
        Whether none of the file was in the page cache when it began.
    """

    first_seconds: float = 0.0
    first_nbytes: int = 0
    dropped: bool = False

    @property
    def first_gbps(self) -> float:
        """Rate until the first transfer had ended, in GB/s."""
        return self.first_nbytes / self.first_seconds / 1e9 if self.first_seconds > 0 else 0.0


class Measuring:
    """One point that is being measured: an open engine, a file, memory, and the rounds so far.

    Parameters
    ----------
    site : Site
        With a file of at least `Point.total_bytes`.
    point : Point
    memory : Memory, optional
        Of the point's kind and bytes, which stays the caller's; taken for this point alone if not
        given.

    Raises
    ------
    UnsupportedError
        This machine can't have such a point: no GPU, no page-locking, no such engine.
    BrokenError
        The operating system refused.
    """

    def __init__(self, site: Site, point: Point, memory: Memory | None = None) -> None:
        self.point = point
        self.rounds: list[Round] = []
        self.began = now()
        self._site = site
        self._content = site.expected[: point.total_bytes]
        self._writes = point.direction == "write"
        self._checked = 0
        with ExitStack() as stack:
            self._memory = memory or stack.enter_context(
                open_memory(point.device, point.memory, point.total_bytes, point.tensor_bytes)
            )
            self._engine = stack.enter_context(
                open_engine(site.folder, point.device, point.backend, **point.options())
            )
            self._file = stack.enter_context(self._engine.open(NAME, "r+"))
            self._batches = self._prepare()
            self._warm_up()
            self._before = self._engine.statistics().by_path
            self._fsync = self._syncs()
            self._stack = stack.pop_all()

    @property
    def engine(self) -> str:
        """Name of the engine that moves the bytes."""
        return self._engine.name

    def round(self, last: bool = False) -> Round:
        """Move the bytes once.

        Parameters
        ----------
        last : bool
            After a write, read back and compare all of the file, and not only some places.

        Raises
        ------
        CorruptError
            The bytes are not what they should be.
        SpillError
            The transfer failed.
        """
        if self._writes:
            return self._write(last)
        self._site.restore()
        self._memory.poison()
        done = self._timed()
        self._memory.check(self._content)
        self._checked += 1
        return done

    def _write(self, last: bool) -> Round:
        refresh(self._content)
        self._memory.fill(self._content)
        # What lies beyond the point's bytes stays as it was.
        dirty, self._site.dirty = self._site.dirty, True
        done = self._timed()
        if last:
            self._site.check_file(self.point.total_bytes)
            self._checked += 1
        else:
            check_written(self._site.file, self._content.numpy())
        self._site.dirty = dirty
        return done

    def row(self, ceilings: Iterable[Ceiling] = ()) -> Row:
        """Return the row of the rounds so far, at least one."""
        point, moved = self.point, self._moved()
        rates = [done.gbps for done in self.rounds]
        rate = statistics.median(rates)
        limit = tightest(ceilings)
        cpu = sum(done.cpu or 0.0 for done in self.rounds)
        return Row(
            ts=self.began,
            host=host(),
            commit=commit(),
            engine=self.engine,
            path_taken=_path_text(moved),
            direction=point.direction,
            gpu=self._memory.gpu,
            device=self._site.storage.device,
            fs=self._site.storage.filesystem or None,
            numa=point.numa,
            block_bytes=point.block_bytes,
            depth=point.depth,
            threads=point.threads,
            total_bytes=point.total_bytes,
            rounds=len(rates),
            gbps_first_done=statistics.median(done.first_gbps for done in self.rounds),
            gbps_last_done=rate,
            gbps_stdev=statistics.stdev(rates) if len(rates) > 1 else 0.0,
            cpu_pct=100 * cpu / sum(done.seconds for done in self.rounds),
            pct_of_ceiling=per_cent(rate, limit),
            ceiling_name=None if limit is None else limit.name,
            o_direct=self._past_cache(moved),
            cache_dropped=all(done.dropped for done in self.rounds),
            fsync=self._fsync,
            verified=self._checked > 0,
            cmd=point.command(self._site.path, len(rates)),
            **_latencies(moved),
        )

    def close(self) -> None:
        """Close the engine and give the memory back; a second time does no harm."""
        self._batches = []
        self._stack.close()

    def _prepare(self) -> list[Batch]:
        """Return a batch for each thread: contiguous shares of the tensors, or of the one."""
        each = self.point.tensor_bytes or self.point.total_bytes
        requests = [
            Request(tensor, self._file, number * each, write=self._writes)
            for number, tensor in enumerate(self._memory.tensors)
        ]
        count = min(self.point.threads, len(requests))
        cuts = [len(requests) * number // count for number in range(count + 1)]
        shares = itertools.pairwise(cuts)
        return [self._engine.prepare(requests[begin:end]) for begin, end in shares]

    def _warm_up(self) -> None:
        """Start threads, load compiled code, take staging memory: all that happens only once."""
        self._site.restore()
        if self._writes:
            self._memory.fill(self._content)
        nbytes, requests, warm = 0, [], min(_WARM, self.point.total_bytes // 4 + 1)
        each = self.point.tensor_bytes or self.point.total_bytes
        for number, tensor in enumerate(self._memory.tensors):
            size = min(tensor.nbytes, warm - nbytes)
            if size <= 0:
                break
            requests.append(Request(tensor, self._file, number * each, size, self._writes))
            nbytes += size
        self._engine.submit(requests).result()

    def _syncs(self) -> bool:
        """Whether the time includes an fsync: by default where the page cache takes the bytes."""
        if not self._writes:
            return False
        if self.point.fsync is not None:
            return self.point.fsync
        return "buffered" in self._before

    def _timed(self) -> Round:
        found = drop_pages(self._site.file)
        done = self._move(dropped=found.cached == 0)
        self.rounds.append(done)
        return done

    def _move(self, dropped: bool) -> Round:
        """Move the bytes, with nothing else going on."""
        engine, batches, nbytes = self._engine, self._batches, self.point.total_bytes
        ended: list[tuple[float, int]] = []
        cpu, begun = time.process_time(), time.perf_counter()
        transfers = [engine.submit(batch) for batch in batches]
        if len(transfers) > 1:
            for transfer in transfers:
                transfer.add_done_callback(partial(_note_end, ended, transfer.nbytes))
        for transfer in transfers:
            transfer.result()
        if self._fsync:
            self._file.sync()
        seconds = time.perf_counter() - begun
        used = time.process_time() - cpu
        first, first_bytes = min(ended, default=(begun + seconds, nbytes))
        return Round(seconds, nbytes, used, 0, first - begun, first_bytes, dropped)

    def _past_cache(self, moved: Mapping[str, PathStatistics]) -> bool:
        cached = _CACHED | {"edge"} if self._writes else _CACHED
        return cached.isdisjoint(name for name, path in moved.items() if path.nbytes)

    def _moved(self) -> dict[str, PathStatistics]:
        statistics_now: EngineStatistics = self._engine.statistics()
        return since(statistics_now.by_path, self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _note_end(ended: list[tuple[float, int]], nbytes: int, _: object) -> None:
    ended.append((time.perf_counter(), nbytes))


def since(
    later: Mapping[str, PathStatistics], earlier: Mapping[str, PathStatistics]
) -> dict[str, PathStatistics]:
    """Return what went each path between two looks at an engine; `slowest` is of all times."""
    found = {}
    for name, path in later.items():
        old = earlier.get(name, PathStatistics())
        found[name] = PathStatistics(
            path.nbytes - old.nbytes,
            path.io_bytes - old.io_bytes,
            path.operations - old.operations,
            path.seconds - old.seconds,
            path.slowest,
            path.why,
            path.latencies - old.latencies,
        )
    return {name: path for name, path in found.items() if path.operations or path.nbytes}


def not_measured(
    site: Site | None, point: Point, why: str, engine: str = "", cmd: str | None = None
) -> Row:
    """Return the row of a point that has no figure."""
    path = "" if site is None else site.path
    storage = None if site is None else site.storage
    return Row(
        ts=now(),
        host=host(),
        commit=commit(),
        engine=engine or point.backend,
        path_taken=f"{NOT_MEASURED}: {why}",
        direction=point.direction,
        gpu=None if point.device == "cpu" else point.device,
        device=None if storage is None else storage.device,
        fs=None if storage is None else storage.filesystem or None,
        numa=point.numa,
        block_bytes=point.block_bytes,
        depth=point.depth,
        threads=point.threads,
        total_bytes=point.total_bytes,
        cmd=point.command(path, 0) if cmd is None else cmd,
    )


def _path_text(moved: Mapping[str, PathStatistics]) -> str:
    """Say which way the bytes went, the most travelled first."""
    total = sum(path.nbytes for path in moved.values())
    ways = sorted(moved.items(), key=lambda item: -item[1].nbytes)
    if len(ways) == 1 or not total:
        return "".join(name for name, _ in ways[:1])
    return ", ".join(f"{name} {_share(path.nbytes / total)}" for name, path in ways if path.nbytes)


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "<1%"


def _latencies(moved: Mapping[str, PathStatistics]) -> dict[str, Any]:
    """Return the columns of latencies, empty for engines that don't time each operation."""
    whole = sum((path.latencies for path in moved.values()), Latencies())
    if whole.count == 0:
        return {}
    slowest = max(path.slowest for path in moved.values())
    shares: Sequence[tuple[str, float]] = (
        ("lat_us_p50", 50),
        ("lat_us_p99", 99),
        ("lat_us_p999", 99.9),
        ("lat_us_max", 100),
    )
    ends = {name: whole.percentile(share) for name, share in shares}
    # The upper end of a histogram's step may be beyond all that there was.
    return {name: 1e6 * (min(end, slowest) if slowest else end) for name, end in ends.items()}
