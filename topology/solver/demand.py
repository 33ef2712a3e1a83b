"""Who may write what, as the solver wants it: groups of bytes, their members, failure domains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.solver.forest import Forest
from tensorspill.topology.solver.spread import rate, spread

__all__ = ["Demand", "first_guess"]


@dataclass(frozen=True, eq=False)
class Demand:
    """Groups of bytes, each to be written by some of its members.

    Parameters
    ----------
    nbytes : array of int64
        Bytes of each group, one copy of them.
    begin : array of int64
        Group g has the members ``begin[g]`` to ``begin[g + 1]``; every group has one.
    ranks : array of int64
        The rank that each member is.
    leaf : array of int64
        The resource at which each member's bytes enter the forest.
    copies : int
        How often each byte is to be written.
    domain : array of int64
        Failure domain of each member. Numbers grow along the members and belong to one group only.
        With one copy there may be a single domain for each group.
    """

    nbytes: Integers
    begin: Integers
    ranks: Integers
    leaf: Integers
    copies: int
    domain: Integers

    @classmethod
    def of(
        cls,
        nbytes: Integers,
        begin: Integers,
        ranks: Integers,
        leaf: Integers,
        copies: int = 1,
        domain: Integers | None = None,
    ) -> Demand:
        """Return a demand whose members are sorted by group, domain and rank.

        `domain` is any number for each member here; members of one group with equal numbers are in
        one domain.
        """
        group = np.repeat(np.arange(len(nbytes)), np.diff(begin))
        if domain is None or copies == 1:
            return cls(nbytes, begin, ranks, leaf, copies, group)
        order = np.lexsort((ranks, domain, group))
        ranks, leaf, domain = ranks[order], leaf[order], domain[order]
        changes = (np.diff(domain, prepend=-1) != 0) | (np.diff(group, prepend=-1) != 0)
        return cls(nbytes, begin, ranks, leaf, copies, np.cumsum(changes) - 1)

    @property
    def domain_begin(self) -> Integers:
        """Domain d has the members ``domain_begin[d]`` to ``domain_begin[d + 1]``."""
        starts = np.flatnonzero(np.diff(self.domain, prepend=-1))
        return np.append(starts, len(self.domain))

    @property
    def domain_owner(self) -> Integers:
        """The group of each domain."""
        return np.searchsorted(self.begin, self.domain_begin[:-1], side="right") - 1


def first_guess(demand: Demand, forest: Forest) -> Integers:
    """Return bytes for each member in proportion to the capacity above it.

    No domain gets more than one copy, so of some groups less than all copies may be given.
    """
    weight = rate(forest, demand.leaf)[demand.leaf]
    if demand.copies == 1:
        return spread(demand.nbytes, demand.begin, weight)
    starts, owner = demand.domain_begin, demand.domain_owner
    first = np.searchsorted(owner, np.arange(len(demand.nbytes) + 1))
    together = np.add.reduceat(weight, starts[:-1])
    scale = max(0, int(together.max()).bit_length() - 20)
    part = spread(demand.copies * demand.nbytes, first, np.maximum(together >> scale, 1))
    return spread(np.minimum(part, demand.nbytes[owner]), starts, weight)
