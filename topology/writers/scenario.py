"""A question to the planner as JSON: machines, layout, model, limits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.topology.machines import cluster
from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.cluster_placement import place_on
from tensorspill.topology.ranks.grid import ParallelLayout
from tensorspill.topology.ranks.placement import Placement
from tensorspill.topology.ranks.rank_table import RankTable
from tensorspill.topology.writers.model_state import model_state
from tensorspill.topology.writers.plan import WriterPlan
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.slices import Atom, Slice, Slices

__all__ = ["FIELDS", "Scenario"]

_MACHINES = ("machine", "nodes", "ranks", "order_of_ranks", "storage", "capacities")
_LAYOUT = ("tp", "cp", "ep", "dp", "pp", "order")
_MODEL = ("params", "expert_params", "zero", "replicate", "weight_bytes", "optimizer_bytes")
_LIMITS = ("unit", "copies", "apart", "exclude", "min_chunk", "max_writers", "block")

#: Every field of a layout file.
FIELDS = (*_MACHINES, *_LAYOUT, *_MODEL, *_LIMITS, "slices")

_TEXTS = ("machine", "storage", "order", "unit", "apart")
_OTHERS = ("ranks", "order_of_ranks", "capacities", "exclude", "slices")


@dataclass(frozen=True)
class Scenario:
    """A question to the planner.

    Parameters
    ----------
    values : mapping
        Of the fields in `FIELDS`: ``machine`` and ``nodes``, or ``ranks`` (a table, see
        `RankTable.parse`); ``order_of_ranks`` (``"block"``, ``"cyclic"`` or a list of places);
        ``storage``, ``capacities``; the sizes of a `ParallelLayout` and the arguments of
        `model_state`, or ``slices`` (name, replicas, nbytes or atoms); and the limits that
        `plan_writers` takes. ``dp`` follows from the number of ranks if it is left out.

    Raises
    ------
    UnsupportedError
        A field is unknown or of a wrong type; the message names it.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if name not in FIELDS:
                raise UnsupportedError(
                    f"A layout has no field {name!r}; it has {', '.join(FIELDS)}"
                )
            if name in _OTHERS:
                continue
            kind = str if name in _TEXTS else int
            if type(value) is not kind:
                raise UnsupportedError(f"{name} is {value!r}, not of type {kind.__name__}")

    @classmethod
    def read(cls, path: str | os.PathLike[str], **changes: Any) -> Scenario:
        """Return the scenario in a JSON file, with some fields changed."""
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise BrokenError.from_oserror(error, "Can't read the layout", path=path) from error
        except ValueError as error:
            raise UnsupportedError(f"The layout is no JSON: {error}", path=path) from error
        if not isinstance(value, dict):
            raise UnsupportedError("The layout is no JSON object", path=path)
        return cls({**value, **changes})

    def placement(self) -> Placement:
        """Return where the ranks are."""
        capacities = self._capacities()
        storage = self.values.get("storage", "machine")
        if "ranks" in self.values:
            table = RankTable.parse(json.dumps(self.values["ranks"]), "ranks")
            return table.placement(storage=storage, capacities=capacities)
        if "machine" not in self.values:
            raise UnsupportedError("A layout needs a machine (with nodes), or ranks")
        machines = cluster(self.values["machine"], self.values.get("nodes", 1))
        ranks = self._order([len(machine.gpus) for machine in machines])
        return place_on(machines, ranks=ranks, storage=storage, capacities=capacities)

    def slices(self, ranks: int) -> Slices:
        """Return what so many ranks hold."""
        if "slices" in self.values:
            return Slices.of(_slice(item) for item in _items(self.values["slices"], "slices"))
        sizes = {name: self.values[name] for name in _LAYOUT if name in self.values}
        if "dp" not in sizes:
            sizes["dp"] = _rest(ranks, sizes)
        layout = ParallelLayout(**sizes)
        if layout.world != ranks:
            raise UnsupportedError(
                f"tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp} are "
                f"{layout.world} ranks, but the machines have {ranks}"
            )
        model = {name: self.values[name] for name in _MODEL if name in self.values}
        return model_state(layout, model.pop("params", 0), **model)

    def plan(self) -> WriterPlan:
        """Return the plan."""
        where = self.placement()
        limits = {name: self.values[name] for name in _LIMITS if name in self.values}
        return plan_writers(self.slices(where.ranks), where, **limits)

    def _capacities(self) -> Capacities:
        given = self.values.get("capacities", {})
        known = ("stream", "switch", "storage", "nic", "filesystem")
        if not isinstance(given, dict) or not set(given) <= set(known):
            raise UnsupportedError(f"capacities is {given!r}, not an object of {', '.join(known)}")
        return Capacities(**given)

    def _order(self, counts: list[int]) -> list[tuple[int, int]] | None:
        """Return (machine, local rank) for each rank, or None for the usual order."""
        order = self.values.get("order_of_ranks", "block")
        places = [(m, i) for m, count in enumerate(counts) for i in range(count)]
        if order == "block":
            return None
        if order == "cyclic":
            return sorted(places, key=lambda place: (place[1], place[0]))
        if not isinstance(order, list) or sorted(map(repr, order)) != sorted(
            map(repr, range(len(places)))
        ):
            raise UnsupportedError(
                f"order_of_ranks is neither block, cyclic nor a list of all {len(places)} places"
            )
        return [places[place] for place in order]


def _rest(ranks: int, sizes: Mapping[str, int]) -> int:
    """Return the data parallelism that is left for so many ranks."""
    inner = 1
    for name in ("tp", "cp", "pp"):
        inner *= sizes.get(name, 1)
    if inner < 1 or ranks % inner:
        named = " x ".join(f"{name} {sizes[name]}" for name in ("tp", "cp", "pp") if name in sizes)
        raise UnsupportedError(f"{named} does not divide {ranks} ranks")
    return ranks // inner


def _items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UnsupportedError(f"{where} is {value!r:.100}, not a list")
    return value


def _slice(item: Any) -> Slice:
    try:
        atoms = tuple(Atom(**atom) for atom in item.get("atoms", ()))
        made = Slice(**{**item, "atoms": atoms})
        sizes = [made.nbytes or 0, *(n for a in atoms for n in (a.rows, a.row_bytes))]
        if not all(type(number) is int for number in [*sizes, *made.replicas]):
            raise TypeError("sizes and ranks are whole numbers")
    except (TypeError, AttributeError) as error:
        raise UnsupportedError(f"{item!r:.200} is no slice: {error}") from error
    return made
