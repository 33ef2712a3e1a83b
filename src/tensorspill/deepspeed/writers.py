"""DeepSpeed's choice of checkpoint writers, made from where ranks really are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.placement import Placement, Unit
from tensorspill.topology.writers.selection import WriterShare, select_writers
from tensorspill.topology.writers.slices import Slice, Slices

__all__ = ["DataParallelWriterConfig", "DataParallelWriterFactory", "GatheredWriterFactory"]

#: ZeRO stage in which every rank has a shard of the weights of its own.
_ALL_SHARDED = 3
_SLICE = "state"


@dataclass
class DataParallelWriterConfig:
    """One writer's part of a slice of state that several ranks have.

    Attributes
    ----------
    world_size, rank : int
        How many writers the slice has, and which of them this is.
    global_rank, local_rank : int
        Which process it is.
    pure_dp : bool
        Whether the whole job is data-parallel.
    """

    world_size: int
    rank: int
    global_rank: int
    local_rank: int
    pure_dp: bool


class DataParallelWriterFactory:
    """Says which ranks write a slice of state, and which part of it.

    Parameters
    ----------
    uni_parallel_info : object
        DeepSpeed's description of the job as this rank sees it: ``global_world_size``,
        ``global_rank``, ``local_rank``, ``pure_dp``, ``num_machines``, ``num_sockets`` (of all
        machines), ``mpu_info`` and ``ep_info`` (with ``dp_rank`` and ``dp_peer_ranks``) or None.
    parallel_unit : {"REPLICA", "SOCKET", "MACHINE"} or None
        Every replica writes, or one on each socket or machine; None for the first replica alone.
    placement : Placement, optional
        Where ranks are; by default, ``num_machines`` machines in the order of the ranks.

    Raises
    ------
    UnsupportedError
        The unit is unknown.

    Notes
    -----
    Who does not write gets None at every ZeRO stage below 3. (DeepSpeed's own makes writers of them
    at stages 1 and 2.) At stage 3 all state is sharded, and every rank writes its own.
    """

    def __init__(
        self, uni_parallel_info: Any, parallel_unit: str | None, placement: Placement | None = None
    ) -> None:
        self._info = uni_parallel_info
        try:
            self._unit = Unit.NONE if parallel_unit is None else Unit(parallel_unit.lower())
        except ValueError as error:
            raise UnsupportedError(f"{parallel_unit!r} is no unit of writers") from error
        self._placement = placement if placement is not None else _in_blocks(uni_parallel_info)

    def create_config(
        self, zero_stage: int, has_moe_layers: bool
    ) -> DataParallelWriterConfig | None:
        """Return this rank's part, or None if it writes nothing of what others have too.

        Raises
        ------
        UnsupportedError
            The job's description and the placement contradict each other.
        """
        if int(zero_stage) >= _ALL_SHARDED:
            return self._config(WriterShare(1, 0))
        slices = Slices.of([Slice(_SLICE, self._peers(has_moe_layers), 1)])
        share = select_writers(slices, self._placement, self._unit).share(
            self._info.global_rank, _SLICE
        )
        return None if share is None else self._config(share)

    def _config(self, share: WriterShare) -> DataParallelWriterConfig:
        info = self._info
        return DataParallelWriterConfig(
            share.count, share.index, info.global_rank, info.local_rank, info.pure_dp
        )

    def _peers(self, has_moe_layers: bool) -> Sequence[int]:
        """Return the ranks that have the same slice as this one."""
        info = self._info
        if has_moe_layers:
            return list(info.ep_info.dp_peer_ranks)
        if info.pure_dp or info.mpu_info is None:
            return range(info.global_world_size)
        return list(info.mpu_info.dp_peer_ranks)


class GatheredWriterFactory(DataParallelWriterFactory):
    """The same, with the placement asked of all ranks: every rank has to make one at a time."""

    def __init__(self, uni_parallel_info: Any, parallel_unit: str | None) -> None:
        from tensorspill.topology.ranks.gathering import gather_ranks

        super().__init__(uni_parallel_info, parallel_unit, gather_ranks().placement())


def _in_blocks(info: Any) -> Placement:
    """Place ranks on machines in their order, as even as possible, the first with one more."""
    machines = max(1, info.num_machines)
    each, more = divmod(info.global_world_size, machines)
    counts = [each + (i < more) for i in range(machines)]
    sockets = max(1, info.num_sockets // machines)
    return Placement.regular(machines, counts, sockets=sockets)
