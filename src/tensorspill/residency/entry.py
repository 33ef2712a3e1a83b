"""A parameter that lives in the spill file, and where it is now."""

from __future__ import annotations

import enum

import torch

from tensorspill.engine.transfer import Transfer
from tensorspill.pool.sizes import round_up

__all__ = ["BUFFER_ALIGNMENT", "Spilled", "State", "cost", "is_plain"]

#: Buffers of the pool begin and end on multiples of this.
BUFFER_ALIGNMENT = 4096


def cost(parameter: torch.Tensor) -> int:
    """Return the bytes of the pool that a parameter takes while it is in memory."""
    return round_up(parameter.nbytes, BUFFER_ALIGNMENT)


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether a parameter is contiguous, or a placeholder of one that is."""
    return parameter.is_contiguous() or not any(parameter.stride())


class State(enum.Enum):
    """Where a spilled parameter is."""

    AWAY = enum.auto()
    COMING = enum.auto()
    HERE = enum.auto()
    #: Here, and being written to the drive: may be read, not changed.
    GOING = enum.auto()


class Spilled:
    """A parameter that lives in the spill file.

    Attributes
    ----------
    parameter : torch.nn.Parameter
        Its ``data`` is a placeholder while it is away.
    nbytes : int
        Bytes of the pool that it takes while it is in memory.
    state : State
        Where it is.
    pins : int
        For how many reasons it must stay in memory.
    dirty, stuck : bool
        The memory has a newer value than the drive; writing it failed.
    version : int
        Of `parameter` (autograd's counter of changes in place) when memory and drive were equal.
    transfer : Transfer or None
        That it is part of.
    memory : torch.Tensor or None
        Its place in the pool, while it is here.
    away : torch.Tensor or None
        The placeholder, while it is away.
    name : str
        For messages.
    """

    __slots__ = (
        "away",
        "dirty",
        "memory",
        "name",
        "nbytes",
        "parameter",
        "pins",
        "state",
        "stuck",
        "transfer",
        "version",
    )

    def __init__(self, parameter: torch.nn.Parameter, name: str = "?") -> None:
        self.parameter = parameter
        self.name = name
        self.nbytes = cost(parameter)
        self.state = State.AWAY
        self.pins = 0
        self.dirty = self.stuck = False
        self.version = parameter._version
        self.transfer: Transfer | None = None
        self.memory: torch.Tensor | None = None
        self.away: torch.Tensor | None = None

    @property
    def address(self) -> int:
        """Of its memory; 0 while it is away."""
        return 0 if self.memory is None else self.memory.data_ptr()

    @property
    def idle(self) -> bool:
        """Whether it may be let go: nobody needs it, and the drive has the same value."""
        return self.state is State.HERE and not self.pins and not self.dirty
