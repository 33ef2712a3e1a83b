"""The ranks that save together: their group for collectives, their store, the plans they made."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from tensorspill.checkpoint.distributed.board import Board
from tensorspill.checkpoint.distributed.planning import Plan
from tensorspill.errors import RankFailedError, SpillError, UnsupportedError
from tensorspill.topology.ranks.gathering import this_rank
from tensorspill.topology.ranks.launch import LaunchedRank, launched
from tensorspill.topology.ranks.rank_table import RankRecord, RankTable

__all__ = ["PlanCache", "Ranks", "combined", "known_ranks", "rank_record", "ranks_of", "table_of"]

#: Plans that are kept; a job has one or two kinds of state that it saves in turn.
_PLANS = 8


class PlanCache:
    """Plans by what this rank brought to them, the last few."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, tuple[str, Plan]] = OrderedDict()

    def key(self, digest: str) -> str:
        """Return what all ranks brought when this one last brought `digest`; empty if never."""
        return self._plans[digest][0] if digest in self._plans else ""

    def get(self, digest: str) -> Plan:
        """Return the plan of that time."""
        self._plans.move_to_end(digest)
        return self._plans[digest][1]

    def put(self, digest: str, key: str, plan: Plan) -> None:
        """Remember a plan."""
        self._plans[digest] = key, plan
        self._plans.move_to_end(digest)
        while len(self._plans) > _PLANS:
            self._plans.popitem(last=False)


class Ranks:
    """The ranks of a process group that save together, or this process alone.

    What they exchange goes through a gloo group of their own, made once, so that nothing of the
    job's groups is disturbed and CUDA has no part in it; and through a store, the launcher's where
    there is one.

    Attributes
    ----------
    ranks : tuple of int
        Their global numbers.
    rank : int
        Of this process, in the group.
    plans : PlanCache
    kept : dict
        What others keep as long as there is this group.
    """

    def __init__(self, ranks: Sequence[int], rank: int, store: Any, group: Any, nonce: str) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.plans = PlanCache()
        self.kept: dict[str, Any] = {}
        self._store, self._group, self._nonce = store, group, nonce
        self._lock = threading.Lock()
        self._serial = 0

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def board(self, timeout: float) -> Board:
        """Return the board of the next save; all ranks must ask for theirs in the same order."""
        with self._lock:
            self._serial += 1
            name = f"{self._nonce}/{self._serial}"
        return Board(PrefixStore(name, self._store), self.rank, self.size, timeout)

    def gather(self, data: bytes, timeout: float) -> list[bytes]:
        """Return what every rank gives; a collective over the group's own gloo group.

        Raises
        ------
        RankFailedError
            A rank was lost, or did not take part within `timeout` seconds.
        """
        if self._group is None:
            return [data]
        try:
            sizes = self._exchange(torch.tensor([len(data)]), timeout)
            longest = max(int(size) for size in sizes)
            mine = torch.zeros(longest, dtype=torch.uint8)
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            every = self._exchange(mine, timeout)
        except RuntimeError as error:
            raise RankFailedError(f"An exchange among the ranks failed: {error}") from error
        return [part.numpy()[: int(n)].tobytes() for part, n in zip(every, sizes, strict=True)]

    def _exchange(self, mine: torch.Tensor, timeout: float) -> list[torch.Tensor]:
        every = [torch.empty_like(mine) for _ in self.ranks]
        self._group.allgather([every], [mine]).wait(timedelta(seconds=timeout))
        return every


_known: dict[int, tuple[Any, Ranks]] = {}
_met: dict[tuple[int, ...], int] = {}
_alone: list[Ranks] = []


def ranks_of(process_group: Any = None, timeout: float = 300.0) -> Ranks:
    """Return the ranks of a group; the first call for it is a collective of the group.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The default group if not given; without one this process is alone.
    timeout : float
        Seconds that a rank may take to come to that first call.

    Raises
    ------
    RankFailedError
        The ranks did not come together.
    UnsupportedError
        This rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise UnsupportedError("There is a process group, but torch.distributed was not begun")
        if not _alone:
            _alone.append(_single())
        return _alone[0]
    group = process_group or dist.group.WORLD
    for key, (known, _) in list(_known.items()):
        if _destroyed(known):
            del _known[key]
    if id(group) not in _known:
        _known[id(group)] = group, _meet(group, timeout)
    return _known[id(group)][1]


def known_ranks() -> list[Ranks]:
    """Return all that `ranks_of` has returned so far, but those of groups that are gone."""
    return [*_alone, *(ranks for _, ranks in _known.values())]


def _single(rank: int = 0) -> Ranks:
    # Where torch.distributed is not built in, there is one process and nothing to tell anybody.
    from torch._C._distributed_c10d import HashStore

    return Ranks((rank,), 0, HashStore(), None, "alone")


def _destroyed(group: Any) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return True
    return False


def _meet(group: Any, timeout: float) -> Ranks:
    rank = dist.get_rank(group)
    if rank < 0:
        raise UnsupportedError("This rank is not in the process group that is to save")
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return _single(ranks[0])
    store = _own_store()
    number = _met[tuple(ranks)] = _met.get(tuple(ranks), 0) + 1
    prefix = f"tensorspill/{'-'.join(map(str, ranks))}/{number}"
    try:
        # Not `new_group`, which all ranks of the job would have to call; what it offers instead
        # (use_local_synchronization) agrees on a name only if all are in equally many groups.
        own = ProcessGroupGloo(
            PrefixStore(f"{prefix}/gloo", store), rank, len(ranks), timedelta(seconds=timeout)
        )
        found = Ranks(ranks, rank, store, own, prefix)
        # A store may remember what an earlier group with these ranks said.
        nonce = found.gather(secrets.token_hex(8).encode(), timeout)[0].decode()
    except (RuntimeError, RankFailedError) as error:
        raise RankFailedError(
            f"The {len(ranks)} ranks did not come together: {error}",
            remedy="All ranks of the group must save, at about the same time",
        ) from error
    return Ranks(ranks, rank, store, own, f"{prefix}/{nonce}")


def _own_store() -> Any:
    """Return a connection of our own to the job's store, where such a store allows that."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def rank_record(ranks: Ranks, folder: str | os.PathLike[str]) -> str:
    """Return, as JSON, where this rank is and what it writes to, for `table_of`."""
    local = 0
    try:
        launch = launched()
        if launch.rank == ranks.ranks[ranks.rank]:
            local = launch.local_rank
    except UnsupportedError:
        pass  # it only helps to guess which devices are near
    mine = LaunchedRank(ranks.rank, ranks.size, local, None, None, "group")
    try:
        record = this_rank(launch=mine, folder=folder)
    except SpillError:
        record = RankRecord(rank=ranks.rank, host=os.uname().nodename, local_rank=local)
    return json.dumps({k: v for k, v in asdict(record).items() if v is not None})


def table_of(records: Sequence[str]) -> RankTable:
    """Return the table of all ranks' records.

    Ranks that share a GPU, or tensors on a CPU beside one, are no reason not to save: then GPUs are
    left out of it.
    """
    found = [RankRecord.parse(json.loads(text), "the exchange of ranks") for text in records]
    gpus = [(record.host, record.gpu) for record in found if record.gpu is not None]
    if len(set(gpus)) < len(gpus):
        found = [replace(record, gpu=None) for record in found]
    return RankTable(tuple(found))


def combined(digests: Sequence[str]) -> str:
    """Return one digest of what all ranks brought."""
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest()
