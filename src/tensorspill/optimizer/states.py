"""Where the state of parameters is: large tensors on the drive, the rest in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from tensorspill.errors import SpillError
from tensorspill.optimizer.local import is_distributed, local_part
from tensorspill.pool.trim import trim
from tensorspill.residency.entry import Spilled, State
from tensorspill.residency.memory import ResidentMemory
from tensorspill.residency.pace import Coming
from tensorspill.residency.store import ParameterStore
from tensorspill.swap.swapper import ParameterSwapper

__all__ = ["StateTensor", "StateTensors"]


class StateTensor:
    """A tensor of an optimizer's state that lives on the drive.

    What is moved is the dense memory below it: of a distributed tensor the shard, of one that is
    not contiguous (channels last, say) the elements in the order of memory.

    Attributes
    ----------
    tensor : torch.Tensor
        As the optimizer sees it; a placeholder while it is away.
    entry : Spilled
        What is moved.
    """

    __slots__ = ("_away", "_strided", "_strides", "entry", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        local = local_part(tensor)
        #: The part of `tensor` that is pointed at what was brought; None if it is that itself.
        self._strided: torch.Tensor | None = None
        self._strides = local.stride()
        if not local.is_contiguous():
            self._strided = local
            self._away = torch.zeros((), dtype=local.dtype, device=local.device).expand(local.shape)
            local = local.as_strided((local.numel(),), (1,))
        self.entry = Spilled(cast(torch.nn.Parameter, local))

    @property
    def in_memory(self) -> bool:
        """Whether its value is in memory, and the newest."""
        return self.entry.state in (State.HERE, State.GOING)

    def attach(self) -> None:
        """Point the tensor at what was brought."""
        if self._strided is not None:
            self._strided.data = self.shaped(self.entry.parameter)

    def detach(self) -> None:
        """Let go of what was brought."""
        if self._strided is not None:
            self._strided.data = self._away

    def shaped(self, dense: torch.Tensor) -> torch.Tensor:
        """Return dense memory in the shape of this process's part of the tensor."""
        if self._strided is None:
            return dense
        return dense.as_strided(self._strided.shape, self._strides)


class StateTensors:
    """All state tensors of an optimizer, with the swapper that keeps them.

    Parameters
    ----------
    swapper : ParameterSwapper
        Its budget limits what is in memory. Closed by `close`.

    Attributes
    ----------
    store : ParameterStore
    memory : ResidentMemory
        With their counts and clock.
    """

    def __init__(self, swapper: ParameterSwapper) -> None:
        self.swapper = swapper
        self.store = ParameterStore(swapper, "optimizer state")
        self.memory = ResidentMemory(self.store, swapper.budget)
        self._known: dict[torch.Tensor, StateTensor] = {}

    def find(self, value: Any) -> StateTensor | None:
        """Return what is known of a value in some state, if it lives on the drive."""
        return self._known.get(value) if isinstance(value, torch.Tensor) else None

    def __iter__(self) -> Iterator[StateTensor]:
        return iter(self._known.values())

    def spilled(self, values: Iterable[Any]) -> list[StateTensor]:
        """Return those of some values that live on the drive."""
        found = (self.find(value) for value in values)
        return [state for state in found if state is not None]

    def spillable(self, value: Any) -> bool:
        """Whether a value of state should live on the drive and doesn't yet."""
        if not isinstance(value, torch.Tensor) or value in self._known:
            return False
        if value.layout is not torch.strided or value.requires_grad:
            return False
        local = local_part(value)
        return (
            type(local) in (torch.Tensor, torch.nn.Parameter)
            and local.device == self.swapper.file.device
            and local.ndim > 0
            and local.nbytes >= max(self.swapper.min_bytes, 1)
            and _is_dense(local)
        )

    def adopt(self, values: Iterable[Any]) -> None:
        """Write those that are `spillable`, and let go their memory.

        Raises
        ------
        CapacityError, BrokenError
            They could not be written; they stay in ordinary memory, as they were.
        """
        fresh = [StateTensor(value) for value in values if self.spillable(value)]
        if not fresh:
            return
        self.store.adopt([state.entry for state in fresh])
        for state in fresh:
            state.detach()
            self._known[state.tensor] = state
        trim()  # or else the heap would grow with all state that went through it

    def acquire(self, states: Sequence[StateTensor], upcoming: Iterable[Coming]) -> None:
        """Bring states to be changed, and begin to read what comes next; see `ResidentMemory`."""
        self.memory.acquire([state.entry for state in states], upcoming, changing=True)
        for state in states:
            state.attach()

    def unpin(self, states: Sequence[StateTensor], *, changed: bool) -> None:
        """Take back what `acquire` did; call `ResidentMemory.tidy` soon."""
        for state in states:
            if changed:  # kernels below a distributed tensor don't count as changes in place
                state.entry.dirty, state.entry.stuck = True, False
            state.detach()
        self.memory.unpin([state.entry for state in states])

    def settle(self) -> None:
        """Wait for all transfers; writes that failed with one that was reported are no news."""
        with contextlib.suppress(SpillError):
            self.store.collect(wait=True)

    def read(self, state: StateTensor) -> torch.Tensor:
        """Return a copy of a state's value, in memory of its own.

        Raises
        ------
        BrokenError, CorruptError
            It could not be read.
        """
        return _like(state.tensor, self.read_local(state))

    def read_local(self, state: StateTensor) -> torch.Tensor:
        """Return a copy of this process's part of a state's value; raises what `read` raises."""
        dense = state.entry.parameter
        copy = torch.empty(dense.shape, dtype=dense.dtype, device=dense.device)
        if state.in_memory:
            copy.copy_(dense)
        else:
            self.swapper.swap_into(dense, copy)
        return state.shaped(copy)

    def forget(self, states: Iterable[StateTensor]) -> None:
        """Give back the room of states that are not used any more; nothing may be under way."""
        for state in states:
            del self._known[state.tensor]
            self.store.drop([state.entry])

    def close(self) -> None:
        """Wait for all transfers, and remove the spill file; a second time does no harm."""
        self.swapper.close()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory, each once."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a process's part as the whole that `tensor` is."""
    if not is_distributed(tensor):
        return local
    whole: Any = tensor
    return type(whole).from_local(  # type: ignore[no-any-return]
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
