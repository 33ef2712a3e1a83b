"""Which rank this process is, from what its launcher left in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensorspill.errors import UnsupportedError

__all__ = ["LaunchedRank", "launched"]


@dataclass(frozen=True)
class LaunchedRank:
    """What a launcher says about a process.

    Attributes
    ----------
    rank, world : int
        Its rank, and the number of ranks.
    local_rank : int
        Its number on its node.
    local_world : int or None
        Ranks on its node, where the launcher says so.
    node : int or None
        The number of its node, where the launcher says so.
    launcher : str
        ``"torchrun"``, ``"deepspeed"``, ``"ray"``, ``"openmpi"``, ``"slurm"`` or, if variables are
        set but nobody signed them, ``"environment"``.

    Raises
    ------
    UnsupportedError
        A number is out of its range.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int | None
    node: int | None
    launcher: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise UnsupportedError(f"{self.launcher}: rank {self.rank} of {self.world} ranks")
        if self.local_rank < 0 or (
            self.local_world is not None and self.local_rank >= self.local_world
        ):
            raise UnsupportedError(
                f"{self.launcher}: rank {self.rank} has local rank {self.local_rank} of "
                f"{self.local_world}"
            )
        if self.node is not None and not 0 <= self.node < self.world:
            raise UnsupportedError(f"{self.launcher}: rank {self.rank} is on node {self.node}")


def launched(environ: Mapping[str, str] | None = None) -> LaunchedRank:
    """Return which rank this process is; without a launcher, rank 0 of 1.

    Parameters
    ----------
    environ : mapping of str, optional
        In place of this process's environment.

    Raises
    ------
    UnsupportedError
        A variable is missing, is no number or contradicts another; the message names them.
    """
    environ = os.environ if environ is None else environ
    for present, read in _READERS:
        if present in environ and (found := read(environ)) is not None:
            return found
    return LaunchedRank(0, 1, 0, 1, 0, "none")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise UnsupportedError(f"The launcher set some variables of a rank, but not {name}")
    if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
        raise UnsupportedError(f"{name}={text!r} is no number")
    return int(text)


def _maybe(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if name in environ else None


def _torch(environ: Mapping[str, str], launcher: str, node: str, local: str) -> LaunchedRank:
    return LaunchedRank(
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        _number(environ, "LOCAL_RANK"),
        _maybe(environ, local),
        _maybe(environ, node),
        launcher,
    )


def _torchrun(environ: Mapping[str, str]) -> LaunchedRank | None:
    # Slurm's variables are those of the agents here, one for each node: no contradiction.
    return _torch(environ, "torchrun", "GROUP_RANK", "LOCAL_WORLD_SIZE")


def _deepspeed(environ: Mapping[str, str]) -> LaunchedRank | None:
    return _torch(environ, "deepspeed", "CROSS_RANK", "LOCAL_SIZE") if "RANK" in environ else None


def _plain(environ: Mapping[str, str]) -> LaunchedRank | None:
    if "NODE_RANK" in environ or "RAY_JOB_ID" in environ:
        found = _torch(environ, "ray", "NODE_RANK", "LOCAL_WORLD_SIZE")
    elif "LOCAL_RANK" not in environ and (other := _openmpi(environ) or _slurm(environ)):
        found = other
    else:
        found = _torch(environ, "environment", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    _agree(environ, found, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if "OMPI_COMM_WORLD_RANK" not in environ:
        _agree(environ, found, "SLURM_PROCID", "SLURM_NTASKS")
    return found


def _agree(environ: Mapping[str, str], found: LaunchedRank, rank: str, world: str) -> None:
    """Raise if another launcher counts as many ranks but gives this process another number."""
    other, ranks = _maybe(environ, rank), _maybe(environ, world)
    mine = _number(environ, "RANK")
    if other is not None and ranks == found.world and other != mine:
        raise UnsupportedError(
            f"RANK={mine} and {rank}={other} contradict each other, in a job of {ranks} ranks",
            remedy=f"Unset one of them, or set RANK from {rank}",
        )


def _openmpi(environ: Mapping[str, str]) -> LaunchedRank | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    return LaunchedRank(
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        _number(environ, "OMPI_COMM_WORLD_SIZE"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _maybe(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        None,
        "openmpi",
    )


def _slurm(environ: Mapping[str, str]) -> LaunchedRank | None:
    if "SLURM_PROCID" not in environ:
        return None
    node = _maybe(environ, "SLURM_NODEID")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    return LaunchedRank(
        _number(environ, "SLURM_PROCID"),
        _number(environ, "SLURM_NTASKS"),
        _number(environ, "SLURM_LOCALID"),
        _tasks(tasks, node),
        node,
        "slurm",
    )


def _tasks(text: str | None, node: int | None) -> int | None:
    """Return the tasks of a node from a list such as ``8(x2),4``."""
    if text is None or node is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if match is None or len(counts) > node:
            break
        counts += [int(match[1])] * min(int(match[2] or 1), node + 1)
    return counts[node] if node < len(counts) else None


_READERS: tuple[tuple[str, Callable[[Mapping[str, str]], LaunchedRank | None]], ...] = (
    ("TORCHELASTIC_RUN_ID", _torchrun),
    ("CROSS_RANK", _deepspeed),
    ("RANK", _plain),
    ("OMPI_COMM_WORLD_RANK", _openmpi),
    ("SLURM_PROCID", _slurm),
)
