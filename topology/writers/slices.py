"""What is to be written: slices of state, each held by some ranks, made of atoms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.replicas import ReplicaSets
from tensorspill.topology.sequences import Joined
from tensorspill.topology.solver.arrays import Integers

__all__ = ["MAX_BYTES", "Atom", "Slice", "Slices"]

#: The most bytes that one plan can hold, all copies together.
MAX_BYTES = 1 << 60


@dataclass(frozen=True)
class Atom:
    """A tensor: `rows` rows of `row_bytes` bytes; it is cut between rows only."""

    name: str
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Slice:
    """State that some ranks hold in equal form.

    Parameters
    ----------
    name : str
        What to call it.
    replicas : sequence of int
        The ranks that hold it. A single one makes it unique: it is written whole by that rank.
    nbytes : int, optional
        Its size, if it can be cut at any byte.
    atoms : sequence of Atom, optional
        Its tensors in order, if it is made of tensors.
    """

    name: str
    replicas: Sequence[int]
    nbytes: int | None = None
    atoms: Sequence[Atom] = field(default=())

    def parts(self) -> Sequence[Atom]:
        """Return its atoms; bytes without structure are one atom with rows of one byte."""
        if self.atoms:
            if self.nbytes not in (None, sum(atom.nbytes for atom in self.atoms)):
                raise UnsupportedError(f"Slice {self.name}: nbytes is not the sum of its atoms")
            return self.atoms
        if self.nbytes is None:
            raise UnsupportedError(f"Slice {self.name} has neither nbytes nor atoms")
        return (Atom(self.name, self.nbytes, 1),)


@dataclass(frozen=True, eq=False)
class Slices:
    """Many slices, as arrays.

    Parameters
    ----------
    names : sequence of str
        One for each slice.
    sets : ReplicaSets
        Sets of ranks that hold slices.
    set_of : array of int64
        Which of the sets holds each slice.
    atom_begin : array of int64
        Slice j consists of the atoms ``atom_begin[j]`` to ``atom_begin[j + 1]``.
    rows, row_bytes : array of int64
        Of each atom.
    atom_names : sequence of str
        One for each atom.

    Raises
    ------
    UnsupportedError
        If a size is negative, or all sizes together are beyond `MAX_BYTES`.
    """

    names: Sequence[str]
    sets: ReplicaSets
    set_of: Integers
    atom_begin: Integers
    rows: Integers
    row_bytes: Integers
    atom_names: Sequence[str]
    atom_bytes: Integers = field(init=False)
    nbytes: Integers = field(init=False)

    def __post_init__(self) -> None:
        wrong = np.flatnonzero((self.rows < 0) | (self.row_bytes < 0))
        if len(wrong):
            raise UnsupportedError(f"Atom {self.atom_names[int(wrong[0])]} has a negative size")
        size = self.rows.astype(float) * self.row_bytes
        if float(size.sum()) > MAX_BYTES:
            raise UnsupportedError(f"{size.sum():.3g} bytes are more than one plan can hold")
        atom_bytes = self.rows * self.row_bytes
        line = np.concatenate(([0], np.cumsum(atom_bytes)))
        object.__setattr__(self, "atom_bytes", atom_bytes)
        object.__setattr__(self, "nbytes", np.diff(line[self.atom_begin]))
        for name in ("set_of", "atom_begin", "rows", "row_bytes", "atom_bytes", "nbytes"):
            getattr(self, name).setflags(write=False)

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> Slices:
        """Return the given slices.

        Raises
        ------
        UnsupportedError
            If two have the same name, one has no replica or no size, or lists a rank twice.
        """
        every = tuple(slices)
        names = [part.name for part in every]
        if len(set(names)) != len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise UnsupportedError(f"Two slices are called {twice}")
        for part in every:
            if len(set(part.replicas)) != len(part.replicas):
                raise UnsupportedError(f"Slice {part.name} lists a replica twice")
        number, sets = ReplicaSets.of(part.replicas for part in every).distinct()
        parts = [part.parts() for part in every]
        atoms = [atom for group in parts for atom in group]
        return cls(
            names,
            sets,
            number,
            np.cumsum([0, *map(len, parts)], dtype=np.int64),
            np.array([atom.rows for atom in atoms], np.int64),
            np.array([atom.row_bytes for atom in atoms], np.int64),
            [atom.name for atom in atoms],
        )

    @classmethod
    def whole(
        cls, names: Sequence[str], nbytes: npt.ArrayLike, sets: ReplicaSets, row_bytes: int = 1
    ) -> Slices:
        """Return one slice of plain bytes for each set, cut at multiples of `row_bytes`."""
        size = np.broadcast_to(np.asarray(nbytes, np.int64), len(sets)).copy()
        number, different = sets.distinct()
        begin = np.arange(len(sets) + 1)
        rows = -(-size // row_bytes) if row_bytes > 1 else size
        return cls(names, different, number, begin, rows, np.full(len(sets), row_bytes), names)

    def joined(self, *others: Slices) -> Slices:
        """Return these slices and then the others'."""
        every = (self, *others)
        number, sets = every[0].sets.joined(*(part.sets for part in others)).distinct()
        first = np.cumsum([0, *(len(part.sets) for part in every)])
        atoms = np.cumsum([0, *(len(part.rows) for part in every)])
        begin = [part.atom_begin[:-1] + atom for part, atom in zip(every, atoms, strict=False)]
        return Slices(
            Joined(*(part.names for part in every)),
            sets,
            number[np.concatenate([s.set_of + at for s, at in zip(every, first, strict=False)])],
            np.concatenate([*begin, atoms[-1:]]),
            np.concatenate([part.rows for part in every]),
            np.concatenate([part.row_bytes for part in every]),
            Joined(*(part.atom_names for part in every)),
        )

    def on(self, sets: ReplicaSets) -> Slices:
        """Return the same slices held by other sets of ranks, one in place of each of these."""
        atoms = self.atom_begin, self.rows, self.row_bytes, self.atom_names
        return Slices(self.names, sets, self.set_of, *atoms)

    def __len__(self) -> int:
        return len(self.set_of)

    def number(self, name: str) -> int:
        """Return the number of the slice of this name, or raise `UnsupportedError`."""
        for number, found in enumerate(self.names):
            if found == name:
                return number
        raise UnsupportedError(f"There is no slice {name}")

    def replicas(self, number: int) -> Integers:
        """Return the ranks that hold a slice, growing."""
        return self.sets[int(self.set_of[number])]
