"""Saving a state: `save`."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tensorspill.checkpoint.distributed.attempt import Attempt, Outcome, Settings
from tensorspill.checkpoint.distributed.describing import Describer
from tensorspill.checkpoint.distributed.description import Held
from tensorspill.checkpoint.distributed.group import Ranks, known_ranks, ranks_of
from tensorspill.checkpoint.distributed.limits import Limits
from tensorspill.checkpoint.distributed.nested import flatten
from tensorspill.checkpoint.distributed.replication import patterns
from tensorspill.checkpoint.files.chunks import ObjectChunk
from tensorspill.checkpoint.objects import dump

__all__ = ["SaveRecord", "Saver", "save"]

#: A rank that writes at less than this part of the median rate is called slow.
_SLOW = 0.5


@dataclass(frozen=True)
class SaveRecord:
    """What a save did.

    Attributes
    ----------
    path : str
        Of the checkpoint.
    step : int
    nbytes, written : int
        Bytes of all files, and of those that this rank wrote.
    seconds, writing : float
        From the call to the commit; and of these, for writing this rank's files.
    planned : bool
        Whether a plan was made; if not, that of an earlier save was used.
    shares : tuple of int
        Bytes that each rank of the group wrote.
    slow : tuple of int
        Ranks of the group that wrote at less than half of the median rate; to be put into
        ``Limits.exclude`` as "rank<number>", if they are to write less.
    """

    path: str
    step: int
    nbytes: int
    written: int
    seconds: float
    writing: float
    planned: bool
    shares: tuple[int, ...]
    slow: tuple[int, ...]

    @classmethod
    def of(cls, outcome: Outcome, attempt: Attempt, begun: float) -> SaveRecord:
        """Return the record of an attempt that has ended well."""
        shares = tuple(nbytes for nbytes, _ in outcome.written)
        return cls(
            outcome.path,
            outcome.step,
            sum(shares),
            shares[attempt.rank],
            time.perf_counter() - begun,
            outcome.written[attempt.rank][1],
            attempt.planned,
            shares,
            _slow(outcome.written),
        )


def save(
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    keep: int | None = None,
    process_group: Any = None,
    replicated: Iterable[str] = (),
    limits: Limits | None = None,
    compare: bool = False,
    timeout: float = 300.0,
    backend: str = "auto",
) -> SaveRecord:
    """Save a state, each byte once, by the ranks that make it fastest; durable when this returns.

    All ranks of the group call it. Dictionaries and lists may be nested in the state; objects with
    `state_dict` and `load_state_dict` at its top, such as modules and optimizers, are asked for
    theirs; those that have their state on a drive may offer a `streaming_state_dict` with `Source`s
    in place of tensors, which are read piece by piece. Names are those of
    torch.distributed.checkpoint (DCP), whose readers can be used as well, see
    `tensorspill.checkpoint.Reader`.

    **What is cut among writers.** Only tensors that are known to be equal on several ranks are cut,
    by whole rows, if they are not small (`Limits.min_chunk`): DTensors along mesh dimensions on
    which they are replicated, as in HSDP; the parameters of modules under
    `DistributedDataParallel` (DDP); the state of optimizers at such parameters; and what
    `replicated` names. DDP is recognised by memory: a plain tensor of the state counts as such a
    parameter, or as state of such a parameter, if it lies where one of a live DDP module does, in
    this process. Copies of them (made by ``cpu_offload=True``, for example) are not recognised.

    All other plain tensors, buffers above all, and all Python objects are written whole by the
    lowest rank that has them, so that values of several ranks are never mixed. **What differs by
    rank and is to be kept of all ranks needs a name that differs by rank.**

    The plan is kept: while state, group, folder and limits stay the same, later saves use it again
    after one comparison of digests. (A folder of the name ``step-<number>`` is made in `folder` for
    each checkpoint, and its file `latest` names the newest one.)

    Parameters
    ----------
    state : mapping
        What to save; it must not change before this returns.
    folder : str or path
        Of all checkpoints of the job, on a file system that all ranks see; made if missing.
    step : int, optional
        Names the checkpoint; one that is there already is replaced. If not given: one more than
        that of the latest.
    keep : int, optional
        Remove all but so many checkpoints, once this one is committed; all are kept if not given.
        The space of a removed one is used again by the next save, which is faster than new space.
    process_group : torch.distributed.ProcessGroup, optional
        Who saves; the default group if there is one.
    replicated : iterable of str
        Patterns of names, such as ``"model.*"``, of tensors that are equal on all ranks that hold
        them. It is for you to be sure.
    limits : Limits, optional
        Who may write, and how finely tensors are cut.
    compare : bool
        First compare the digests of everything that is taken to be equal on several ranks.
    timeout : float
        Seconds without progress after which a rank counts as lost and the save fails. Who makes
        progress may take any time. Waiting for others to come counts as well, so it should be more
        than what ranks may be apart.
    backend : str
        See `tensorspill.open_engine`.

    Raises
    ------
    RankFailedError
        A rank died, hangs or did not come; nothing was committed.
    OutcomeUnknownError
        The rank that commits was lost while it did, or the store through which the ranks talk:
        `latest` tells what is there. With torchrun the store outlives all ranks; elsewhere it
        usually ends with rank 0.
    SpillError
        What went wrong at whichever rank, for instance `NoSpaceError`; all ranks raise the same,
        with the rank in `ranks`. Nothing was committed, and the next save removes what is left.
        ``Limits(exclude=[f"rank{r}" for r in error.ranks])`` saves without that rank's writing.
    """
    begun = time.perf_counter()
    ranks = ranks_of(process_group, timeout)
    settings = Settings(
        root=os.path.abspath(os.fspath(folder)),
        step=step,
        keep=keep,
        limits=limits or Limits(),
        compare=compare,
        timeout=timeout,
        backend=backend,
    )
    saver = saver_of(ranks)
    attempt = saver.begin(state, settings, replicated)
    attempt.write(attempt.chunks(), dumped(attempt), file_name(attempt.rank))
    return SaveRecord.of(attempt.finish(), attempt, begun)


def file_name(rank: int, part: int = 0) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"rank{rank:05d}-{part}.safetensors"


def dumped(attempt: Attempt) -> list[ObjectChunk]:
    """Return the Python objects that this rank writes, as bytes."""
    with attempt.together():
        return [ObjectChunk(name, dump(name, value)) for name, value in attempt.objects().items()]


class Saver:
    """What is remembered from one save of a group to the next.

    Attributes
    ----------
    ranks : Ranks
    running : AsyncSave or None
        The asynchronous save that was begun last.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.running: Any = None
        self._describer = Describer(ranks)

    def begin(
        self,
        state: Mapping[str, Any],
        settings: Settings,
        replicated: Iterable[str],
        refuse: bool = False,
    ) -> Attempt:
        """Agree with all ranks on a save; waits for an asynchronous one that is under way.

        Raises what that one raised, if nobody has asked it yet, and what `Attempt.agree` raises.
        """
        vouched = patterns(replicated)
        running, self.running = self.running, None
        attempt = Attempt(self.ranks, settings)

        def bring() -> tuple[Held, str]:
            if running is not None:
                try:
                    running.settle(refuse)
                finally:
                    # Unless it has ended, it is still what runs.
                    self.running = None if running.done() else running
            flat, paths = flatten(asked(state))
            asks = "save", settings.root
            return self._describer.describe(flat, paths, vouched, settings.limits, asks)

        attempt.agree(bring)
        return attempt


def saver_of(ranks: Ranks) -> Saver:
    """Return what is remembered of a group's saves."""
    found: Saver = ranks.kept.setdefault("saver", Saver(ranks))
    return found


def wait_for_saves() -> None:
    """Wait until no asynchronous save of this process is under way; their errors are kept."""
    for ranks in known_ranks():
        saver = ranks.kept.get("saver")
        if saver is not None and saver.running is not None:
            saver.running.wait()


def asked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state in which objects at its top are replaced by their state dictionaries."""
    found = {}
    for name, value in state.items():
        stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        if stateful and not isinstance(value, torch.Tensor):
            with warnings.catch_warnings():
                # Of FSDP1, whose own ways of saying what it returns are deprecated.
                warnings.simplefilter("ignore", FutureWarning)
                ask = getattr(value, "streaming_state_dict", value.state_dict)
                value = ask()
        found[name] = value
    return found


def _slow(written: tuple[tuple[int, float], ...]) -> tuple[int, ...]:
    rates = {r: n / s for r, (n, s) in enumerate(written) if n >= 64 << 20 and s > 0}
    if len(rates) < 2:
        return ()
    usual = statistics.median(rates.values())
    return tuple(rank for rank, rate in rates.items() if rate < _SLOW * usual)
