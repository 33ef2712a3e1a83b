"""Tuning: which block, depth and threads a device needs, found by halving the candidates.

Every rung measures all candidates that are left in rounds, in random order, and compares them
inside a round, since drives change their rate from minute to minute. Half of them go on: the
fastest, and of the rest that may be within 95 % of the best those that cost the least memory.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tensorspill.errors import UnsupportedError
from tensorspill.profiling.bench import Tick
from tensorspill.profiling.measuring import Measuring
from tensorspill.profiling.memory import Memory, open_memory
from tensorspill.profiling.points import DIRECTIONS, Point
from tensorspill.profiling.rows import Row
from tensorspill.profiling.site import Site

__all__ = ["Candidate", "Mix", "Tuned", "candidates", "deepspeed_block", "tune"]

MIB = 1 << 20
#: What counts as good enough: a share of the best rate.
ENOUGH = 0.95
#: A candidate that may still be good enough, given what few rounds can tell.
_PERHAPS = 0.85
_BLOCKS = (128 << 10, 256 << 10, 512 << 10, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
_DEPTHS = (4, 8, 16, 32, 64)
_THREADS = (1, 2)
#: More memory than this in flight is no setting to recommend.
_MOST_IN_FLIGHT = 128 * MIB
#: Candidates that are left for the last rung, and rounds that these should be measured in.
_FINALISTS, _FINAL_ROUNDS = 6, 9
#: Share of the time for all rungs but the last, which decides; and how late a rung may end.
_EARLY, _LATE = 0.5, 0.1
#: Bytes of a transfer at least.
_LEAST = 16 * MIB


@dataclass(frozen=True, slots=True)
class Mix:
    """What is to be fast.

    Attributes
    ----------
    read : float
        Share of the bytes that are read, 0 to 1; the others are written.
    tensor_bytes : int or None
        Bytes of each tensor; None for large ones.
    device, backend : str
        Of the engine.
    memory : str
        See `Point`.
    """

    read: float = 0.5
    tensor_bytes: int | None = None
    device: str = "cpu"
    backend: str = "auto"
    memory: str = "aligned"

    def __post_init__(self) -> None:
        if not 0 <= self.read <= 1:
            raise UnsupportedError(f"The share of reads is from 0 to 1, not {self.read}")

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions that take part."""
        shares = zip(DIRECTIONS, (self.read, 1 - self.read), strict=True)
        return tuple(direction for direction, share in shares if share > 0)

    def rate(self, gbps: Mapping[str, float]) -> float:
        """Return the rate of the mix from the rates of its directions, one after the other."""
        shares = {"read": self.read, "write": 1 - self.read}
        seconds = sum(shares[way] / gbps[way] for way in self.directions)
        return 1 / seconds


@dataclass(slots=True, eq=False)
class Candidate:
    """A setting, and what was measured of it.

    Attributes
    ----------
    block_bytes, depth, threads : int
    ratios : list of float
        In each round of its last rung: its rate over the median rate of all in that round.
    gbps : list of float
        Rates of the mix in each round of its last rung.
    """

    block_bytes: int
    depth: int
    threads: int
    ratios: list[float] = field(default_factory=list)
    gbps: list[float] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, int, int]:
        """What makes a setting small: memory in flight, then threads, then operations."""
        return (self.block_bytes * self.depth * self.threads, self.threads, self.depth)

    @property
    def options(self) -> dict[str, int]:
        """The options of an engine."""
        return {"block_bytes": self.block_bytes, "depth": self.depth, "threads": self.threads}

    def point(self, mix: Mix, direction: str, nbytes: int) -> Point:
        """Return the point that measures one direction."""
        return Point(
            direction=direction,
            total_bytes=nbytes,
            backend=mix.backend,
            device=mix.device,
            memory=mix.memory,
            tensor_bytes=mix.tensor_bytes,
            block_bytes=self.block_bytes,
            depth=self.depth,
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning found.

    Attributes
    ----------
    choice, best : Candidate
        The smallest that is good enough, and the fastest.
    mix : Mix
    engine : str
        Name of the engine that was measured.
    finalists : tuple of Candidate
        All that were measured to the end, the fastest first.
    rows : tuple of Row
        Of the finalists' last rounds, a row for each direction.
    tried : int
        Candidates in all.
    seconds : float
    """

    choice: Candidate
    best: Candidate
    mix: Mix
    engine: str
    finalists: tuple[Candidate, ...]
    rows: tuple[Row, ...]
    tried: int
    seconds: float


def candidates(nbytes: int, cores: int) -> list[Candidate]:
    """Return the settings to try.

    Parameters
    ----------
    nbytes : int
        Bytes of a round at most: what could not be filled is left out.
    cores : int
        More threads than these only wait for each other.
    """
    grid = itertools.product(_BLOCKS, _DEPTHS, [n for n in _THREADS if n <= max(1, cores)])
    limit = min(_MOST_IN_FLIGHT, max(nbytes // 2, _BLOCKS[0] * _DEPTHS[0]))
    return [Candidate(*each) for each in grid if each[0] * each[1] * each[2] <= limit]


def tune(
    site: Site,
    mix: Mix,
    tried: Sequence[Candidate],
    seconds: float = 45.0,
    tick: Tick = lambda _done, _total, _text: None,
    chance: random.Random | None = None,
) -> Tuned:
    """Find the smallest setting within 95 % of the best.

    Parameters
    ----------
    site : Site
    mix : Mix
    tried : sequence of Candidate
        At least one.
    seconds : float
        To take in all, about.
    tick : callable
    chance : random.Random, optional
        Decides about the order.

    Raises
    ------
    UnsupportedError
        No engine can be had as the mix asks.
    SpillError
        A transfer failed.
    """
    chance = chance or random.Random()  # noqa: S311
    return _Tuning(site, mix, seconds, tick, chance).run(list(tried))


class _Tuning:
    def __init__(
        self, site: Site, mix: Mix, seconds: float, tick: Tick, chance: random.Random
    ) -> None:
        self._site = site
        self._mix = mix
        self._seconds = seconds
        self._tick = tick
        self._chance = chance
        self._begun = time.perf_counter()
        self._engine = ""
        self._rows: dict[Candidate, list[Row]] = {}

    def run(self, tried: list[Candidate]) -> Tuned:
        left, rungs = list(tried), _rungs(len(tried))
        for number, keep in enumerate(rungs):
            share = _EARLY * self._seconds * (number + 1) / len(rungs)
            left = self._rung(left, share, f"{len(left)} of {len(tried)} settings left")
            left = survivors(left, keep)
        left = self._rung(left, self._seconds, f"the last {len(left)}", last=True)
        ranked = sorted(left, key=_middle, reverse=True)
        return Tuned(
            choice=choose(ranked),
            best=ranked[0],
            mix=self._mix,
            engine=self._engine,
            finalists=tuple(ranked),
            rows=tuple(row for candidate in ranked for row in self._rows.get(candidate, ())),
            tried=len(tried),
            seconds=self._elapsed(),
        )

    def _elapsed(self) -> float:
        return time.perf_counter() - self._begun

    def _rung(
        self, left: list[Candidate], until: float, text: str, last: bool = False
    ) -> list[Candidate]:
        """Measure all in rounds, until so many seconds are over; return those with a figure.

        A machine that is busy with other things may not get through one round: what has no figure
        then is out.
        """
        for candidate in left:
            candidate.gbps.clear()
        nbytes, rounds, took = self._bytes(left, until, last), 0, 0.0
        mix = self._mix
        with open_memory(mix.device, mix.memory, nbytes, mix.tensor_bytes) as memory:
            while rounds == 0 or self._elapsed() + took / 2 < until:
                begun = self._elapsed()
                limit = until + _LATE * self._seconds
                if not self._round(left, memory, nbytes, text, limit, last):
                    break
                rounds, took = rounds + 1, self._elapsed() - begun
        left = [candidate for candidate in left if candidate.gbps]
        complete = min(len(candidate.gbps) for candidate in left)
        for candidate in left:
            del candidate.gbps[complete:]
        middles = [statistics.median(rates) for rates in zip(*(c.gbps for c in left), strict=True)]
        for candidate in left:
            pairs = zip(candidate.gbps, middles, strict=True)
            candidate.ratios[:] = [rate / middle for rate, middle in pairs]
        return left

    def _bytes(self, left: Sequence[Candidate], until: float, last: bool) -> int:
        """Return the bytes of a transfer such that the rounds wanted fit into the time."""
        transfers = len(left) * len(self._mix.directions) * (_FINAL_ROUNDS if last else 1)
        each = max(0.01, (until - self._elapsed()) / transfers)
        # Opening, filling, poisoning and comparing take longer than moving.
        moved = int(self._site.first_write_gbps * 1e9 * each / 3) // MIB * MIB
        # In the end nobody is to be measured with a queue that is never full.
        least = max(2 * candidate.cost[0] for candidate in left) if last else _LEAST
        return min(max(moved, least, _LEAST), self._site.nbytes)

    def _round(
        self,
        left: Sequence[Candidate],
        memory: Memory,
        nbytes: int,
        text: str,
        limit: float,
        last: bool,
    ) -> bool:
        """Measure each once, in random order; say whether time allowed all."""
        order = list(left)
        self._chance.shuffle(order)
        for number, candidate in enumerate(order):
            if number >= _FINALISTS and self._elapsed() > limit:
                return False
            self._tick(min(self._elapsed(), self._seconds), self._seconds, text)
            gbps, rows = {}, []
            for direction in self._mix.directions:
                point = candidate.point(self._mix, direction, nbytes)
                with Measuring(self._site, point, memory) as one:
                    self._engine = one.engine
                    gbps[direction] = one.round().gbps
                    rows.append(one.row())
            candidate.gbps.append(self._mix.rate(gbps))
            if last:
                self._rows[candidate] = rows
        return True


def _rungs(count: int) -> list[int]:
    """Return how many candidates each rung leaves, down to the finalists."""
    found = []
    while count > _FINALISTS:
        count = max(_FINALISTS, count // 2)
        found.append(count)
    return found


def _middle(candidate: Candidate) -> float:
    return statistics.median(candidate.ratios)


def survivors(left: Sequence[Candidate], keep: int) -> list[Candidate]:
    """Return who goes on: half by rate, and half by cost of those that may be good enough."""
    ranked = sorted(left, key=_middle, reverse=True)
    fastest = ranked[: (keep + 1) // 2]
    rest = [c for c in ranked[len(fastest) :] if _middle(c) >= _PERHAPS * _middle(ranked[0])]
    cheap = sorted(rest, key=lambda candidate: candidate.cost)[: keep - len(fastest)]
    chosen = [*fastest, *cheap]
    return chosen + [c for c in ranked if c not in chosen][: keep - len(chosen)]


def choose(ranked: Sequence[Candidate]) -> Candidate:
    """Return the cheapest that is surely within 95 % of the first, given how its rounds spread."""
    best = ranked[0]
    enough = [best]
    for candidate in ranked[1:]:
        pairs = zip(candidate.gbps, best.gbps, strict=True)
        if _at_least([rate / of_best for rate, of_best in pairs]) >= ENOUGH:
            enough.append(candidate)
    return min(enough, key=lambda candidate: candidate.cost)


def _at_least(ratios: Sequence[float]) -> float:
    """Return the median less two standard errors, by the spread of the middle half.

    With one, a tenth of the choices were below 95 % when measured again, on simulated drives whose
    rate varies by 5 to 12 % from round to round; with two it was half of that.
    """
    if len(ratios) < 2:
        return ratios[0] - (1 - ENOUGH)
    q1, middle, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle - 2 * 1.25 * (q3 - q1) / 1.349 / math.sqrt(len(ratios))


def deepspeed_block(options: Mapping[str, int], use_gds: bool = False) -> dict[str, object]:
    """Return the block ``aio`` of a DeepSpeed configuration for an engine's options."""
    return {
        "aio": {
            "block_size": options["block_bytes"],
            "queue_depth": options["depth"],
            "intra_op_parallelism": options["threads"],
            "single_submit": False,
            "overlap_events": True,
            "use_gds": use_gds,
        }
    }
