"""One save, step by step: agree on a plan, write, commit; or fail everywhere alike.

Order of calls, on every rank of the group:

1. `agree`: ranks tell each other what they hold, by a digest. If all hold what they held before,
   the plan of that time is used again; else they exchange descriptions and plan anew.
2. `write`: this rank's share, from the tensors themselves or from copies of them.
3. `finish`: the coordinator commits once all have written.

Whatever is raised is the same error on all ranks that are left; nothing is committed then, or, for
an `OutcomeUnknownError`, nobody knows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from tensorspill.checkpoint.distributed.board import Board
from tensorspill.checkpoint.distributed.comparing import compare_replicas
from tensorspill.checkpoint.distributed.describing import plan_together
from tensorspill.checkpoint.distributed.description import Held
from tensorspill.checkpoint.distributed.group import Ranks, combined
from tensorspill.checkpoint.distributed.limits import Limits
from tensorspill.checkpoint.distributed.opened import opened_engines
from tensorspill.checkpoint.distributed.planning import Plan
from tensorspill.checkpoint.distributed.share import Piece, pieces_of
from tensorspill.checkpoint.distributed.wire import (
    decode_error,
    decode_written,
    encode_error,
    encode_written,
    from_rank,
)
from tensorspill.checkpoint.files.chunks import Chunk, ObjectChunk
from tensorspill.checkpoint.files.commit import Pending, begin, latest
from tensorspill.checkpoint.files.layout import Layouts
from tensorspill.checkpoint.files.manifest import assemble
from tensorspill.checkpoint.files.quiet import collection_paused
from tensorspill.checkpoint.files.records import Written
from tensorspill.checkpoint.files.writing import write_file
from tensorspill.errors import OutcomeUnknownError, SpillError, UnsupportedError
from tensorspill.pool.buffer_pool import BufferPool

__all__ = ["STAGING", "Attempt", "Outcome", "Settings", "next_step", "step_name"]

#: For content that can't be written from where it is.
STAGING = 64 << 20

_STEP = re.compile(r"step-(\d{1,18})")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to save.

    Attributes
    ----------
    root : str
        Absolute path of the folder of checkpoints; every rank sees the same.
    step : int or None
        None: one more than that of the latest checkpoint.
    keep : int or None
        How many checkpoints to keep.
    limits : Limits
    compare : bool
        Compare replicas before they are cut.
    timeout : float
        Seconds without progress after which a rank fails the save.
    backend : str
        See `tensorspill.open_engine`.
    """

    root: str
    step: int | None = None
    keep: int | None = None
    limits: Limits = field(default_factory=Limits)
    compare: bool = False
    timeout: float = 300.0
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.step is not None and (isinstance(self.step, bool) or self.step < 0):
            raise UnsupportedError(f"Step {self.step!r} is no number of a step")
        if self.keep is not None and self.keep < 1:
            raise UnsupportedError(f"At least one checkpoint has to be kept, not {self.keep}")
        if not self.timeout > 0:
            raise UnsupportedError(f"A timeout of {self.timeout} s leaves no time")


@dataclass(frozen=True)
class Outcome:
    """What is known to all ranks after a save.

    Attributes
    ----------
    path : str
        Of the checkpoint.
    step : int
    written : tuple of (int, float)
        Bytes that each rank wrote, and in how many seconds.
    """

    path: str
    step: int
    written: tuple[tuple[int, float], ...]


def step_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


class Attempt:
    """A save that is under way; see the module.

    Parameters
    ----------
    ranks : Ranks
    settings : Settings

    Attributes
    ----------
    plan : Plan
        After `agree`.
    planned : bool
        Whether it was made anew.
    """

    plan: Plan

    def __init__(self, ranks: Ranks, settings: Settings) -> None:
        self.settings = settings
        self.planned = False
        self._ranks = ranks
        self._board: Board = ranks.board(settings.timeout)
        self._pending: Pending | None = None
        self._folder = ""
        self._step = 0
        self._written: list[Written] = []
        self._held = Held()

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return self._ranks.rank

    # -- agreeing ------------------------------------------------------------------------------

    def agree(self, bring: Callable[[], tuple[Held, str]]) -> None:
        """Find out with all ranks who writes what.

        Parameters
        ----------
        bring : callable
            Returns what this rank holds, and a digest of it; what it raises fails the save
            everywhere.
        """
        with self.together(), collection_paused():
            held, digest = self._bring(bring)
            go = self._go()
            self._folder, self._step = go["folder"], go["step"]
            if go["plan"] == "cached":
                self.plan = self._ranks.plans.get(digest)
            else:
                self.plan = plan_together(
                    self._ranks,
                    held,
                    self.settings.root,
                    self.settings.limits,
                    self.settings.timeout,
                )
                self._ranks.plans.put(digest, go["key"], self.plan)
                self.planned = True
            self._held = held
            if self.settings.compare:
                compare_replicas(self._ranks, self.plan, held, self.settings.timeout)

    def _bring(self, bring: Callable[[], tuple[Held, str]]) -> tuple[Held, str]:
        settings = self.settings
        held, digest = Held(), ""
        asked = [settings.root, settings.step, settings.keep, settings.compare]
        message: dict[str, Any] = {"asked": asked}
        try:
            held, digest = bring()
            message |= {"digest": digest, "cached": self._ranks.plans.key(digest)}
        except Exception as error:
            message["error"] = encode_error(from_rank(error, self.rank))
        self._board.say("here", json.dumps(message).encode())
        if "error" in message and self.rank:
            # The coordinator makes it everybody's.
            self._board.outcome()
        return held, digest

    def _go(self) -> dict[str, Any]:
        if self.rank == 0:
            here = [json.loads(data) for data in self._board.hear_all("here")]
            for message in here:
                if "error" in message:
                    raise decode_error(message["error"])
            for rank, message in enumerate(here):
                if message["asked"] != here[0]["asked"]:
                    raise UnsupportedError(
                        f"Rank {rank} of the group saves otherwise than rank 0 does: (folder, "
                        f"step, keep, compare) are {message['asked']} and {here[0]['asked']}"
                    )
            self._board.say("go", json.dumps(self._begin(here)).encode())
        found: dict[str, Any] = json.loads(self._board.hear("go", [0])[0])
        return found

    def _begin(self, here: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Open the pending checkpoint, and say how to go on."""
        settings = self.settings
        key = combined([message["digest"] for message in here])
        cached = all(message["cached"] == key for message in here)
        step = next_step(settings.root) if settings.step is None else settings.step
        self._pending = begin(settings.root, step_name(step), replace=True)
        plan = "cached" if cached else "new"
        return {"plan": plan, "key": key, "folder": self._pending.folder, "step": step}

    # -- writing -------------------------------------------------------------------------------

    def chunks(self) -> list[Chunk]:
        """Return what this rank has to write of tensors, as views."""
        with self.together(), collection_paused():
            known: WeakKeyDictionary[Plan, list[Piece]]
            known = self._ranks.kept.setdefault("pieces", WeakKeyDictionary())
            pieces = known.get(self.plan)
            if pieces is None:
                pieces = known[self.plan] = pieces_of(self.plan, self.rank, self._held.parts)
            values = self._held.values
            return [piece.of(values) for piece in pieces]

    def objects(self) -> dict[str, Any]:
        """Return the Python objects that this rank has to write."""
        mine = set(self.plan.objects_of(self.rank))
        pairs = zip(self._held.parts, self._held.values, strict=True)
        return {part.name: value for part, value in pairs if part.name in mine} if mine else {}

    def write(self, chunks: Sequence[Chunk], objects: Sequence[ObjectChunk], name: str) -> None:
        """Write a file of this rank's; it is durable when this returns."""
        if not (chunks or objects):
            return
        with self.together():
            self._board.working(True)
            try:
                settings = self.settings
                with (
                    opened_engines(settings.root, settings.backend) as engines,
                    BufferPool(STAGING) as staging,
                ):
                    written = write_file(
                        *(self._folder, name, chunks, objects),
                        engine=engines,
                        staging=staging,
                        progress=self._board.advance,
                        layouts=self._ranks.kept.setdefault("layouts", Layouts()),
                    )
            finally:
                self._board.working(False)
            self._written.append(written)

    # -- the end -------------------------------------------------------------------------------

    def finish(self) -> Outcome:
        """Commit, or wait until the coordinator has committed."""
        with self.together(), collection_paused():
            self._held = Held()
            if self.rank == 0:
                self._commit()
            else:
                said = [encode_written(written) for written in self._written]
                lengths = " ".join(str(len(data)) for data in said)
                self._board.say("done", b"".join((lengths.encode(), b"\n", *said)))
            told = json.loads(self._board.outcome())
        self._board.close()
        return Outcome(told["path"], self._step, tuple(map(tuple, told["written"])))

    def _commit(self) -> None:
        others = self._board.hear("done", range(1, self._ranks.size))
        done = [self._written, *(_split(data) for data in others)]
        manifest = assemble(
            [written for every in done for written in every],
            self.plan.tensors,
            step=self._step,
            plan_digest=self.plan.digest,
            key_paths=self.plan.paths,
        )
        rates = [(sum(w.file.nbytes for w in all_), sum(w.seconds for w in all_)) for all_ in done]
        self._board.claim()
        self._board.working(True)
        pending = self._pending
        if pending is None:
            raise UnsupportedError("The save was not begun")
        try:
            path = pending.commit(manifest, self.settings.keep)
        except Exception as error:
            told: Exception = error
            if pending.renamed:
                told = OutcomeUnknownError(
                    f"The checkpoint is there, but may not survive a loss of power: {error}",
                    path=pending.folder,
                )
            self._board.conclude(from_rank(told, 0))
            raise told from error
        self._board.conclude(json.dumps({"path": path, "written": rates}).encode())

    def abandon(self, error: BaseException) -> SpillError:
        """Let the save fail everywhere because of an error here; return what to raise."""
        try:
            return self._board.fail(from_rank(error, self.rank))
        finally:
            try:
                if self._pending is not None:
                    self._pending.abandon()
            finally:
                self._board.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let an error here be the same error everywhere."""
        try:
            yield
        except Exception as error:
            found = self.abandon(error)
            if self._ranks.size == 1:
                raise
            raise found from (error if error is not found else None)
        except BaseException as error:
            self.abandon(error)
            raise


def _split(data: bytes) -> list[Written]:
    head, _, rest = data.partition(b"\n")
    found, at = [], 0
    for length in map(int, head.split()):
        found.append(decode_written(rest[at : at + length]))
        at += length
    return found


def next_step(root: str) -> int:
    """Return the number of the step after that of the latest checkpoint."""
    path = latest(root)
    found = None if path is None else _STEP.fullmatch(os.path.basename(path))
    return 0 if found is None else int(found[1]) + 1
