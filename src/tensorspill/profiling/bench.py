"""The benchmark of a folder: points one after the other, against fio and against the ceilings."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tensorspill.errors import SpillError, UnsupportedError
from tensorspill.profiling import fio
from tensorspill.profiling.ceilings import Ceiling, device_ceilings, measured
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import page_aligned
from tensorspill.profiling.measuring import Measuring, not_measured
from tensorspill.profiling.others import fio_job, fio_row, gdsio_row, nvbandwidth_rows
from tensorspill.profiling.points import DIRECTIONS, Point
from tensorspill.profiling.rounds import Case, Results, Spread, noise_floor, run_rounds
from tensorspill.profiling.rows import Row
from tensorspill.profiling.site import Site

__all__ = ["Bench", "Comparison", "Tick", "round_bytes", "standard_points"]

MIB = 1 << 20

#: Told what has been done, of how much in all, and what comes next. Never called while something
#: is being timed.
Tick = Callable[[float, float, str], None]
#: Told each row as soon as it is there, and the GB/s of its rounds.
OnRow = Callable[[Row, Sequence[float]], None]

OURS, THEIRS, AGAIN = "bench", "fio", "fio again"
#: Within this of fio counts as equal to fio.
CLOSE = 0.05


@dataclass(frozen=True, slots=True)
class Comparison:
    """A point against fio, in pairs of the same round.

    Attributes
    ----------
    label : str
    ratio : Spread or None
        Of our rate over fio's; None if fio is not there.
    noise : float or None
        What two runs of fio differ by: half of the pairs differ by less.
    fio_spread : Spread or None
        Of fio over fio, in the same rounds.
    why : str
        Why there is no comparison.
    """

    label: str
    ratio: Spread | None = None
    noise: float | None = None
    fio_spread: Spread | None = None
    why: str = ""

    @property
    def close(self) -> bool | None:
        """Whether the two are equal: within 5 %, or within what fio differs from itself."""
        if self.ratio is None or self.fio_spread is None:
            return None
        away = abs(self.ratio.median - 1)
        spread = max(abs(self.fio_spread.q1 - 1), abs(self.fio_spread.q3 - 1))
        return away <= max(CLOSE, spread)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return asdict(self) | {"close": self.close}


@dataclass(slots=True)
class Bench:
    """Measures points on a site.

    Parameters
    ----------
    site : Site
    rounds : int
        Of each point.
    tick : callable
    on_row : callable

    Attributes
    ----------
    rows : list of Row
    round_gbps : list of list of float
        Of each row.
    ceilings : dict of str to tuple of Ceiling
        By direction, those of host memory.
    comparisons : list of Comparison
    """

    site: Site
    rounds: int = 5
    tick: Tick = lambda _done, _total, _text: None
    on_row: OnRow = lambda _row, _rounds: None
    rows: list[Row] = field(default_factory=list)
    round_gbps: list[list[float]] = field(default_factory=list)
    ceilings: dict[str, tuple[Ceiling, ...]] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    _done: float = 0.0
    _total: float = 0.0
    _chance: random.Random = field(default_factory=random.Random)

    def run(self, points: Sequence[Point], compared: Sequence[Point] = ()) -> None:
        """Measure points, those compared with fio first, since fio's rate is a ceiling.

        Raises
        ------
        CorruptError
            Bytes were not what they should be.
        SpillError
            A transfer failed.
        """
        # A program that is not there takes no time.
        with_fio = 3 if fio.available() else 1
        self._total += (self.rounds + 1) * (with_fio * len(compared) + len(points)) + 1
        self._step("copying memory")
        rate, count = _copy_gbps()
        copy = measured("host copy", rate, f"measured: memmove in {count} threads")
        for direction in DIRECTIONS:
            known = device_ceilings(self.site.machine, self.site.storage, direction)
            self.ceilings[direction] = (*known, copy)
        self._advance(1)
        for point in compared:
            self.compare(point)
        for point in points:
            self.measure(point)
        self._step("done")

    def measure(self, point: Point) -> Row:
        """Measure one point and return its row, which says why if that is not possible here."""
        self._step(point.label)
        try:
            with Measuring(self.site, point) as measuring:
                self._advance(1)
                for number in range(self.rounds):
                    self._step(point.label)
                    measuring.round(last=number == self.rounds - 1)
                    self._advance(1)
                row = measuring.row(self._limits(point))
                rates = [done.gbps for done in measuring.rounds]
        except UnsupportedError as error:
            self._advance(self.rounds + 1)
            row, rates = not_measured(self.site, point, error.message), []
        return self._add(row, rates)

    def compare(self, point: Point) -> Comparison:
        """Measure one point and the same pattern by fio, in turn, and return how they compare."""
        self._step(point.label)
        if not fio.available():
            self.measure(point)
            return self._without_fio(point, "fio is not installed")
        job = fio_job(self.site, point)
        with Measuring(self.site, point) as measuring:
            cases: dict[str, Case] = {
                OURS: lambda: measuring.round(last=len(measuring.rounds) == self.rounds - 1),
                THEIRS: lambda: self._fio(job),
                AGAIN: lambda: self._fio(job),
            }
            try:
                results = run_rounds(cases, self.rounds, self._chance, self._told(point))
            except fio.FioError as error:
                row = measuring.row(self._limits(point)) if measuring.rounds else None
                if row is not None:
                    self._add(row, [done.gbps for done in measuring.rounds])
                return self._without_fio(point, str(error))
            samples = [
                sample
                for name in (THEIRS, AGAIN)
                for sample in results.samples[name]
                if isinstance(sample, fio.FioSample)
            ]
            rate = statistics.median(sample.gbps for sample in samples)
            limit = measured(f"fio {point.label}", rate, "measured in the same rounds")
            # Another kind of page is another limit: the last one, of huge pages, is for the rest.
            self._drop_fio(point.direction)
            self.ceilings[point.direction] += (limit,)
            rates = [done.gbps for done in measuring.rounds]
            self._add(measuring.row(self._limits(point)), rates)
        self._add(
            fio_row(self.site, point, samples, self._limits(point)), [s.gbps for s in samples]
        )
        return self._compared(point, results)

    def other_programs(self, point: Point) -> None:
        """Measure what gdsio and nvbandwidth give for the pattern of a point, where they are."""
        on_gpu = replace(point, device="cuda:0" if point.device == "cpu" else point.device)
        for direction in DIRECTIONS:
            self._add(gdsio_row(self.site, replace(on_gpu, direction=direction)), ())
        for row in nvbandwidth_rows(self.site, on_gpu):
            self._add(row, ())

    def _fio(self, job: fio.FioJob) -> Sample | None:
        if job.rw == "write":
            self.site.dirty = True
        return fio.run_fio(job)

    def _compared(self, point: Point, results: Results) -> Comparison:
        both = results.ratios(AGAIN, THEIRS)
        found = Comparison(
            point.label,
            results.spread_of_ratios(OURS, THEIRS),
            noise_floor(both),
            results.spread_of_ratios(AGAIN, THEIRS),
        )
        self.comparisons.append(found)
        return found

    def _drop_fio(self, direction: str) -> None:
        known = self.ceilings[direction]
        self.ceilings[direction] = tuple(c for c in known if not c.name.startswith("fio "))

    def _without_fio(self, point: Point, why: str) -> Comparison:
        row = not_measured(self.site, point, why, "fio", "fio")
        self._add(row, ())
        found = Comparison(point.label, why=why)
        self.comparisons.append(found)
        return found

    def _limits(self, point: Point) -> tuple[Ceiling, ...]:
        limits = self.ceilings.get(point.direction, ())
        if point.device == "cpu":
            return limits
        gpu = _gpu_of(self.site, point.device)
        extra = device_ceilings(self.site.machine, self.site.storage, point.direction, gpu)
        return (*limits, *(ceiling for ceiling in extra if ceiling not in limits))

    def _add(self, row: Row, rates: Sequence[float]) -> Row:
        self.rows.append(row)
        self.round_gbps.append(list(rates))
        self.on_row(row, rates)
        return row

    def _told(self, point: Point) -> Callable[[str], None]:
        def tell(text: str) -> None:
            self._advance(1)
            self._step(f"{point.label}: {text}")

        return tell

    def _advance(self, steps: float) -> None:
        self._done = min(self._done + steps, self._total)

    def _step(self, text: str) -> None:
        self.tick(self._done, self._total, text)


def round_bytes(site: Site, seconds: float, least: int = 16 * MIB) -> int:
    """Return how many bytes a round may move to take about so long, in whole MiB."""
    wanted = int(site.first_write_gbps * 1e9 * seconds) // MIB * MIB
    return min(max(wanted, least), site.nbytes)


def standard_points(nbytes: int, most: int, quick: bool) -> tuple[list[Point], list[Point]]:
    """Return the points of a benchmark: those to compare with fio, and the others.

    One setting is varied at a time, around 1 MiB and 32 operations of one thread.

    Parameters
    ----------
    nbytes, most : int
        Bytes of a round; of one that is compared with fio, whose clock ticks in milliseconds.
    quick : bool
        Fewer of them.
    """
    base = Point(direction="read", total_bytes=nbytes)
    # Plain fio moves small pages, and as we do it is with huge ones.
    compared = [
        replace(base, direction=direction, memory=memory, total_bytes=most)
        for memory in ("small-pages", "aligned")
        for direction in DIRECTIONS
    ]
    blocks = (128 << 10, 4 * MIB) if quick else (64 << 10, 256 << 10, 4 * MIB, 16 * MIB)
    depths = (4,) if quick else (1, 4, 8, 64, 128)
    threads = (2,) if quick else (2, 4)
    tensors = (256 << 10,) if quick else (16 << 10, 256 << 10, 4 * MIB)
    varied = [
        *(replace(base, block_bytes=block) for block in blocks),
        *(replace(base, depth=depth, total_bytes=_fewer(nbytes, depth)) for depth in depths),
        *(replace(base, threads=count, tensor_bytes=_each(nbytes, count)) for count in threads),
        *(replace(base, tensor_bytes=size) for size in tensors if size < nbytes),
        replace(base, memory="ordinary"),
        replace(base, memory="pinned"),
        replace(base, device="cuda:0", backend="aio"),
        replace(base, device="cuda:0", backend="gds"),
    ]
    pairs = itertools.product(varied, DIRECTIONS)
    return compared, [replace(point, direction=direction) for point, direction in pairs]


def _fewer(nbytes: int, depth: int) -> int:
    """Move less where little is under way, since that is slow."""
    return max(nbytes // 4, min(nbytes, MIB)) if depth == 1 else nbytes


def _each(nbytes: int, count: int) -> int | None:
    """Return the size of tensors of which each thread has some."""
    size = nbytes // (4 * count) // 4096 * 4096
    return size or None


def _copy_gbps(nbytes: int = 64 * MIB, rounds: int = 5) -> tuple[float, int]:
    """Return the rate of copying memory, and the number of threads that did."""
    count = min(4, len(os.sched_getaffinity(0)))
    parts = [(page_aligned(nbytes // count), page_aligned(nbytes // count)) for _ in range(count)]
    moves = [(target.data_ptr(), source.data_ptr(), source.nbytes) for source, target in parts]
    with ThreadPoolExecutor(count) as pool:

        def copy() -> None:
            for done in [pool.submit(ctypes.memmove, *move) for move in moves]:
                done.result()

        rates = [timed(copy, nbytes // count * count).gbps for _ in range(rounds)]
    return statistics.median(rates), count


def _gpu_of(site: Site, device: str) -> Any:
    """Return the machine's record of a CUDA device, or None."""
    from tensorspill.pool.cuda.contexts import normal_device
    from tensorspill.pool.cuda.driver import call

    try:
        index = normal_device(device).index
        bdf: bytes = call("cuDeviceGetPCIBusId", 20, index)
        return site.machine.gpu(bdf.decode().strip("\0 "))
    except SpillError:
        return None


def ceilings_json(ceilings: dict[str, tuple[Ceiling, ...]]) -> dict[str, list[dict[str, Any]]]:
    """Return ceilings as JSON values."""
    return {way: [asdict(each) for each in found] for way, found in ceilings.items()}
