"""State as others see it: dictionaries that read when asked, and loading in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import (
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tensorspill.checkpoint.files.chunks import Source
from tensorspill.errors import UnsupportedError
from tensorspill.optimizer.local import is_distributed, shard_like
from tensorspill.optimizer.states import StateTensor, StateTensors
from tensorspill.optimizer.visits import visiting
from tensorspill.optimizer.wrapped import Group

if TYPE_CHECKING:
    from tensorspill.optimizer.optimizer import SpilledOptimizer

__all__ = [
    "MASTER",
    "ParameterState",
    "StateSource",
    "States",
    "Undigested",
    "keep_undigested",
    "loaded",
]

#: Under which name a parameter's master weights are part of its state.
MASTER = "master"

_BATCH_BYTES = 16 << 20

_REMEDY = "Use load_state_dict; what is read of a state is a copy"


class StateSource(Source):
    """A state tensor, to be had piece by piece; of a distributed one, this process's shard.

    Attributes
    ----------
    dtype : torch.dtype
    shape : tuple of int
        Of the shard.
    whole : torch.Tensor or None
        The distributed tensor.
    """

    def __init__(self, tensors: StateTensors, state: StateTensor) -> None:
        self._tensors = tensors
        self._state = state
        self.whole = state.tensor if is_distributed(state.tensor) else None
        self.dtype = state.entry.parameter.dtype
        self.shape = tuple(state.shaped(state.entry.parameter).shape)
        self._copy: torch.Tensor | None = None

    def fill(self, start: int, out: torch.Tensor) -> None:
        """Put elements `start` and following, in row-major order, into 1-D `out`, all of it.

        The tensor is read as a whole for its first piece, and let go with its last.
        """
        if self._copy is None:
            self._copy = self._tensors.read_local(self._state).reshape(-1)
        out.copy_(self._copy[start : start + out.numel()])
        if start + out.numel() >= self._copy.numel():
            self._copy = None


class ParameterState(dict[str, Any]):
    """The state of one parameter: reads a tensor when it is asked for it, and returns a copy.

    A dictionary by all that shows, so that torch's optimizers and `torch.save` take it; copied or
    pickled it is a plain one.
    """

    def __init__(self, optimizer: SpilledOptimizer, parameter: torch.Tensor) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._parameter = parameter

    def sources(self) -> dict[str, Any]:
        """Return the state with a `StateSource` in place of each tensor that is on the drive."""
        tensors = self._optimizer.state_tensors
        return {
            key: value if (found := tensors.find(value)) is None else StateSource(tensors, found)
            for key, value in self._raw().items()
        }

    def __getitem__(self, key: str) -> Any:
        """Return a copy of a value."""
        with self._optimizer.lock:
            value = self._raw()[key]
            found = self._optimizer.state_tensors.find(value)
            if found is not None:
                return self._optimizer.state_tensors.read(found)
            return value.clone() if isinstance(value, torch.Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw())

    def __len__(self) -> int:
        return len(self._raw())

    def __contains__(self, key: object) -> bool:
        return key in self._raw()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a copy of a value, or `default`."""
        try:
            return self[key]
        except KeyError:
            return default

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Return the names."""
        return KeysView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return copies of the values, each made when it is come to."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return names and copies of the values, each made when it is come to."""
        return ItemsView(self)

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary with copies of all values."""
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = None

    def __reduce__(self) -> tuple[Any, ...]:
        # What torch.load makes even where it trusts nobody.
        return OrderedDict, (), None, None, iter(self.items())

    def __repr__(self) -> str:
        return f"<ParameterState of {', '.join(self._raw())}>"

    def __setitem__(self, key: str, value: Any) -> NoReturn:
        raise UnsupportedError("State on the drive can't be set", remedy=_REMEDY)

    def _raw(self) -> dict[str, Any]:
        return self._optimizer.raw_state(self._parameter)


class States(MutableMapping[torch.Tensor, ParameterState]):
    """What a spilled optimizer has as its ``state``: the state of each parameter that has one."""

    def __init__(self, optimizer: SpilledOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: torch.Tensor) -> ParameterState:
        return ParameterState(self._optimizer, parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if self._optimizer.raw_state(parameter):
                    yield parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, torch.Tensor) and bool(self._optimizer.raw_state(parameter))

    def __setitem__(self, parameter: torch.Tensor, state: Any) -> NoReturn:
        raise UnsupportedError("State on the drive can't be set", remedy=_REMEDY)

    def __delitem__(self, parameter: torch.Tensor) -> NoReturn:
        raise UnsupportedError("State on the drive can't be deleted", remedy=_REMEDY)


class Undigested:
    """A parameter's state that is being loaded, as it came.

    Torch's ``load_state_dict`` leaves it alone; it would cast all state before any is stored.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values


@contextmanager
def keep_undigested(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch's ``load_state_dict`` check and match all, and leave values as they came."""

    def wrap(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {
            key: Undigested(value) if isinstance(value, Mapping) else value
            for key, value in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    handle = optimizer.register_load_state_dict_pre_hook(wrap)
    try:
        yield
    finally:
        handle.remove()


Loaded = tuple[dict[torch.Tensor, torch.Tensor], dict[torch.Tensor, dict[str, Any]]]


def loaded(optimizer: SpilledOptimizer, new: Mapping[Any, Any], groups: Sequence[Group]) -> Loaded:
    """Store state that is being loaded, some parameters at a time.

    Returns
    -------
    masters : dict
        For each parameter, if it has one.
    states : dict
        For each parameter, or its master.

    Raises
    ------
    CapacityError, BrokenError
        It could not be stored; none of it is.
    """
    tensors = optimizer.state_tensors
    masters: dict[torch.Tensor, torch.Tensor] = {}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    batch: list[Any] = []
    try:
        for group in groups:
            for parameter in group["params"]:
                if not isinstance(new.get(parameter), Undigested):
                    continue
                state = _cast(optimizer, parameter, new[parameter].values, group)
                if (master := state.pop(MASTER, None)) is not None:
                    masters[parameter] = master
                states[parameter if master is None else master] = state
                batch += [*state.values(), master]
                if sum(v.nbytes for v in batch if isinstance(v, torch.Tensor)) > _BATCH_BYTES:
                    tensors.adopt(batch)
                    batch = []
        tensors.adopt(batch)
    except BaseException:
        kept = [*masters.values(), *(v for state in states.values() for v in state.values())]
        tensors.forget(tensors.spilled(kept))
        raise
    return masters, states


def _cast(
    optimizer: SpilledOptimizer, parameter: torch.Tensor, values: Mapping[str, Any], group: Group
) -> dict[str, Any]:
    """Return values of a parameter's state as torch would cast them, in memory of their own."""
    masters = optimizer.masters
    wanted = masters.wanted(parameter)
    like = parameter.detach()
    if wanted:
        like = torch.empty(0, dtype=masters.dtype, device=parameter.device)
    policy: Any = torch.optim.Optimizer._process_value_according_to_param_policy
    settings = [{**group, "params": [0]}]
    state: dict[str, Any] = {}
    for key in values:
        value = values[key]
        if key == MASTER and not wanted:
            continue
        if isinstance(value, torch.Tensor):
            cast = policy(like, shard_like(value, parameter), 0, settings, key)
            # Not the caller's own tensor, which would be a placeholder afterwards, or change with
            # ours if it stays in memory.
            alias = cast.detach()
            value = alias if optimizer.state_tensors.spillable(alias) else alias.clone()
        state[key] = value
    if wanted and MASTER not in state:
        with visiting([parameter]), torch.no_grad():
            state[MASTER] = parameter.detach().to(masters.dtype)
    return state
