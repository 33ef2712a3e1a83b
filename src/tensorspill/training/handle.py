"""What an offloaded model is operated by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

import torch
from torch import nn

from tensorspill.errors import MissingNameError, UnsupportedError
from tensorspill.residency import Residency, ResidencyStatistics
from tensorspill.residency.guards import Uncopyable
from tensorspill.swap.swapper import ParameterSwapper
from tensorspill.training.watching import ForwardWatch

__all__ = ["Offloaded", "SpilledState", "offloaded"]

_ATTRIBUTE = "_tensorspill"


class Offloaded(Uncopyable):
    """What belongs to a model that was offloaded; see `offloaded`.

    Attributes
    ----------
    model : torch.nn.Module
    residency : Residency
        Brings its parameters.
    swapper : ParameterSwapper
        Holds them.
    """

    def __init__(self, model: nn.Module, residency: Residency, swapper: ParameterSwapper) -> None:
        self.model = model
        self.residency = residency
        self.swapper = swapper
        self._watch = ForwardWatch(model, residency)
        self.model.__dict__[_ATTRIBUTE] = self

    def state(self) -> SpilledState:
        """Return the model's state as a mapping that reads each tensor when it is asked for."""
        return SpilledState(self.model, self.residency)

    def statistics(self) -> ResidencyStatistics:
        """Return what was done so far; works after `close` as well."""
        return self.residency.statistics()

    def flush(self) -> None:
        """Wait until all that was changed is on the drive, and let go what is not in use.

        Raises
        ------
        SpillError
            A write failed; a later call tries again.
        """
        self.residency.flush()

    def close(self, *, restore: bool = False) -> None:
        """End it and remove the spill file; a second time does no harm.

        Parameters
        ----------
        restore : bool
            Bring all parameters, and gradients, back to ordinary memory, where they must fit. The
            model is then an ordinary one; else its parameters are placeholders, and lost.

        Raises
        ------
        SpillError
            A read of `restore` failed, or a write; the spill file is still there, close again.
        """
        self._watch.remove()
        self.residency.close(restore=restore)
        self.swapper.close()
        if self.model.__dict__.get(_ATTRIBUTE) is self and restore:
            del self.model.__dict__[_ATTRIBUTE]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def offloaded(model: nn.Module) -> Offloaded:
    """Return what an offloaded model is operated by: its statistics, state and end.

    Raises
    ------
    UnsupportedError
        The model was not offloaded.
    """
    found = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(found, Offloaded):
        raise UnsupportedError(
            f"This {type(model).__name__} was not offloaded",
            remedy="Ask for the module that was given to `offload`, not one inside or around it",
        )
    return found


class SpilledState(Mapping[str, torch.Tensor]):
    """The state of an offloaded model, one tensor at a time.

    Has the names of ``state_dict``. Every access reads, and returns a tensor of the caller's own;
    who uses one after the other needs memory for one.
    """

    def __init__(self, model: nn.Module, residency: Residency) -> None:
        self._residency = residency
        self._tensors = dict(named_state(model))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise MissingNameError(f"The model has no {name!r}")
        return self._residency.value_of(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a model under the names of its ``state_dict``."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dot + name, buffer
