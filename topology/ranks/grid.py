"""Parallel layouts: which ranks are replicas of each other under tp, cp, ep, dp and pp."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.replicas import ReplicaSets
from tensorspill.topology.solver.arrays import Integers

__all__ = ["ParallelLayout", "RankGrid", "equal_groups", "explicit_groups"]

_KINDS = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, eq=False)
class RankGrid:
    """Ranks in a grid with named dimensions.

    Parameters
    ----------
    dims : sequence of str
        Name of each dimension.
    ranks : array of int64
        The rank at each place; each rank from 0 on occurs once.

    Raises
    ------
    UnsupportedError
        If a rank is missing or occurs twice, or names and shape don't fit.
    """

    dims: tuple[str, ...]
    ranks: Integers

    def __post_init__(self) -> None:
        ranks = np.array(self.ranks, np.int64)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "dims", tuple(self.dims))
        if len(self.dims) != ranks.ndim or len(set(self.dims)) != len(self.dims):
            raise UnsupportedError(f"Dimensions {self.dims} of a grid of shape {ranks.shape}")
        _each_once(ranks.ravel(), ranks.size, "the grid")

    @classmethod
    def from_device_mesh(cls, mesh: Any) -> RankGrid:
        """Return the grid of a `torch.distributed.device_mesh.DeviceMesh`.

        Dimensions without names are called ``dim0``, ``dim1``, …
        """
        ranks = np.asarray(mesh.mesh.cpu().numpy(), np.int64)
        names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(ranks.ndim))
        return cls(tuple(names), ranks)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks.size

    def coordinate(self, dim: str) -> Integers:
        """Return each rank's place along a dimension."""
        axis = self._axis(dim)
        shape = [1] * self.ranks.ndim
        shape[axis] = -1
        place = np.broadcast_to(np.arange(self.ranks.shape[axis]).reshape(shape), self.ranks.shape)
        found = np.empty(self.size, np.int64)
        found[self.ranks.ravel()] = place.ravel()
        return found

    def groups(self, over: Iterable[str]) -> ReplicaSets:
        """Return the sets of ranks that differ in these dimensions only.

        Sets are in the order of the other dimensions, the last of which changes fastest.
        """
        inside = [self._axis(dim) for dim in over]
        outside = [axis for axis in range(self.ranks.ndim) if axis not in inside]
        count = math.prod(self.ranks.shape[axis] for axis in outside)
        return ReplicaSets.rows(self.ranks.transpose(outside + inside).reshape(count, -1))

    def labels(self, over: Iterable[str]) -> list[str]:
        """Return a name for each set that `groups` returns: ``tp0.pp3``."""
        inside = set(over)
        kept = [i for i, dim in enumerate(self.dims) if dim not in inside]
        shape = [self.ranks.shape[i] for i in kept]
        places = np.ndindex(*shape)
        names = [self.dims[i] for i in kept]
        return [".".join(f"{n}{i}" for n, i in zip(names, at, strict=True)) for at in places]

    def _axis(self, dim: str) -> int:
        if dim not in self.dims:
            raise UnsupportedError(f"There is no dimension {dim!r} in {', '.join(self.dims)}")
        return self.dims.index(dim)


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of tensor, context, expert, data and pipeline parallelism, and the order of ranks.

    Expert parallelism takes its ranks from data and context parallelism: dense state is replicated
    over dp x cp, and the experts' over the rest of these, which is called edp.

    Parameters
    ----------
    tp, cp, ep, dp, pp : int
        The sizes; there are tp x cp x dp x pp ranks.
    order : str
        Which dimension changes fastest from rank to rank, then the next, and so on. The default is
        Megatron's.

    Raises
    ------
    UnsupportedError
        If a size is below 1, the order is none of the five dimensions, or ep does not divide dp x
        cp or would tear stages apart.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        for kind in _KINDS:
            if (size := getattr(self, kind)) < 1:
                raise UnsupportedError(f"{kind} is {size}; it is 1 or more")
        object.__setattr__(self, "order", _complete(self.order, self._sizes()))
        if self.dp * self.cp % self.ep:
            raise UnsupportedError(
                f"Expert parallelism of {self.ep} does not divide dp {self.dp} x cp {self.cp}"
            )
        if self.ep > 1:
            dense, experts = self.dense.coordinate("pp"), self.experts.coordinate("pp")
            if not np.array_equal(dense, experts):
                raise UnsupportedError(
                    f"In the order {self.order}, experts would be in other stages than dense state",
                    remedy="Put pp last, or first",
                )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def dense(self) -> RankGrid:
        """The grid of dense state: tp, cp, dp and pp."""
        return self._grid({k: n for k, n in self._sizes().items() if k != "ep"})

    @property
    def experts(self) -> RankGrid:
        """The grid of expert state: tp, ep, edp and pp."""
        edp = self.dp * self.cp // self.ep
        return self._grid({"tp": self.tp, "ep": self.ep, "dp": edp, "pp": self.pp}, {"dp": "edp"})

    def _sizes(self) -> dict[str, int]:
        return {kind: getattr(self, kind) for kind in _KINDS}

    def _grid(self, sizes: Mapping[str, int], rename: Mapping[str, str] | None = None) -> RankGrid:
        slowest_first = [dim for dim in self.order.split("-")[::-1] if dim in sizes]
        shape = [sizes[dim] for dim in slowest_first]
        names = tuple((rename or {}).get(dim, dim) for dim in slowest_first)
        return RankGrid(names, np.arange(math.prod(shape)).reshape(shape))


def explicit_groups(groups: Sequence[Iterable[int]], world: int) -> ReplicaSets:
    """Return replica sets from groups of ranks, such as process groups list them.

    Raises
    ------
    UnsupportedError
        If a rank is in no group or in two, or does not exist; the message names it.
    """
    sets = [list(group) for group in groups]
    every = np.array([rank for group in sets for rank in group], np.int64)
    _each_once(every, world, "the groups")
    return ReplicaSets.of(sets)


def equal_groups(world: int, size: int, what: str = "group") -> npt.NDArray[np.int64]:
    """Return the ranks in rows of `size`, or raise if that does not divide their number."""
    if size < 1 or world % size:
        raise UnsupportedError(f"A {what} of {size} ranks does not divide {world} ranks")
    return np.arange(world).reshape(-1, size)


def _each_once(ranks: Integers, count: int, where: str) -> None:
    wrong = ranks[(ranks < 0) | (ranks >= count)]
    if len(wrong):
        raise UnsupportedError(f"Rank {wrong[0]} in {where} does not exist: there are {count}")
    seen = np.bincount(ranks, minlength=count)
    if (seen > 1).any():
        raise UnsupportedError(f"Rank {int(np.argmax(seen > 1))} occurs twice in {where}")
    if (seen == 0).any():
        raise UnsupportedError(f"Rank {int(np.argmax(seen == 0))} is missing in {where}")


def _complete(order: str, sizes: Mapping[str, int]) -> str:
    """Return the order with what it leaves out put last; that may only be of size 1."""
    given = order.split("-")
    if len(set(given)) != len(given) or not set(given) <= set(_KINDS):
        raise UnsupportedError(f"Order {order!r} is not made of {', '.join(_KINDS)}")
    missing = [kind for kind in _KINDS if kind not in given]
    for kind in missing:
        if sizes[kind] > 1 and kind != "ep":
            raise UnsupportedError(f"Order {order!r} does not say where {kind} {sizes[kind]} goes")
    if "ep" in missing and "dp" in given:
        missing.remove("ep")
        given.insert(given.index("dp"), "ep")
    return "-".join(given + missing)
