"""How a save may be divided among writers."""

from __future__ import annotations

from dataclasses import dataclass

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.placement import Placement
from tensorspill.topology.ranks.rank_table import RankTable

__all__ = ["Limits"]

MIN_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How replicated tensors may be divided among writers, and by which idea of the machines.

    Parameters
    ----------
    min_chunk : int
        Bytes. A replicated tensor of at least this size is cut into boxes of whole rows, each about
        a multiple of this; smaller ones are written whole. Writers are balanced within one of
        these.
    unit : str
        Of what there is to be one writer for each set of replicas: "replica" (every rank that has
        one may write), "socket", "machine", "nic", "nvme", "gpu-switch", or "none": one writer.
    max_writers : int, optional
        No set of replicas gets more writers than this.
    exclude : tuple of str
        Resources through which nothing is to be written, since they are dead or slow: "rank3" for
        what rank 3 of the group writes itself, or names that `Placement` gives to machines, NICs
        and storage.
    table : RankTable, optional
        Where the group's ranks are; discovered if not given.
    storage : str
        "machine" or "shared", see `RankTable.placement`.
    capacities : Capacities, optional
        Rates where the table gives none.
    """

    min_chunk: int = MIN_CHUNK
    unit: str = "replica"
    max_writers: int | None = None
    exclude: tuple[str, ...] = ()
    table: RankTable | None = None
    storage: str = "machine"
    capacities: Capacities | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.min_chunk, int) or self.min_chunk < 1:
            raise UnsupportedError(f"min_chunk is {self.min_chunk!r}; a byte is the least")
        if isinstance(self.exclude, str):
            raise UnsupportedError("exclude takes names in a list, not one text")
        object.__setattr__(self, "exclude", tuple(sorted(set(self.exclude))))

    def placement(self, table: RankTable) -> Placement:
        """Return where the ranks are, `table` being what was discovered."""
        known = self.table or table
        return known.placement(storage=self.storage, capacities=self.capacities)
