"""Having parameters and their gradients in memory, wherever they live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from tensorspill.residency import Residency, SpilledGradients, residency_of

__all__ = [
    "bringing_gradients",
    "fetch_ahead",
    "hand_over",
    "has_spilled_gradient",
    "offloaded",
    "visit_bytes",
    "visit_limit",
    "visiting",
]

#: Of an offloaded model's memory, what may be visited at a time: beside it others are fetched.
_SHARE = 4


def residencies(parameters: Iterable[torch.Tensor]) -> list[Residency]:
    """Return the residencies that some parameters belong to."""
    found = (residency_of(parameter) for parameter in parameters)
    return list({id(one): one for one in found if one is not None}.values())


def offloaded(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some of these parameters visit memory only."""
    return any(residency_of(parameter) is not None for parameter in parameters)


@contextmanager
def visiting(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Return a context in which parameters and gradients are in memory, the first to be changed.

    Raises
    ------
    CapacityError
        They don't fit in memory together.
    SpillError
        A read failed, or an earlier write.
    """
    with ExitStack() as stack:
        for residency in residencies(parameters):
            stack.enter_context(residency.updating_parameters(parameters))
        stack.enter_context(bringing_gradients(parameters))
        yield


@contextmanager
def bringing_gradients(
    parameters: Sequence[torch.Tensor], *, changing: bool = False
) -> Iterator[None]:
    """Return a context in which the gradients of parameters are in memory."""
    with ExitStack() as stack:
        for gradients in _gradients(parameters):
            stack.enter_context(gradients.bringing(parameters, changing=changing))
        yield


def has_spilled_gradient(parameter: torch.Tensor) -> bool:
    """Whether a parameter's gradient is on the drive."""
    return any(gradients.has(parameter) for gradients in _gradients([parameter]))


def hand_over(parameters: Sequence[torch.Tensor], taken: Callable[[torch.Tensor], bool]) -> None:
    """Keep gradients of which `taken` says so from being spilled when they are complete."""
    for gradients in _gradients(parameters):
        gradients.hand_over(parameters, taken)


def fetch_ahead(parameters: Sequence[torch.Tensor], *, gradients_only: bool = False) -> None:
    """Begin to read what will be visited next, if there is room."""
    if not gradients_only:
        for residency in residencies(parameters):
            residency.fetch_ahead(parameters)
    for gradients in _gradients(parameters):
        gradients.fetch_ahead(parameters)


def visit_limit(parameters: Iterable[torch.Tensor]) -> int:
    """Return how many bytes of an offloaded model may be visited at a time."""
    found = residencies(parameters)
    figures = [residency.statistics() for residency in found]
    limits = [figure.budget_bytes - figure.outside_bytes for figure in figures]
    limits += [r.gradients.pool.capacity for r in found if r.gradients is not None]
    return min(limits, default=0) // _SHARE


def visit_bytes(parameter: torch.Tensor) -> int:
    """Return how many bytes of an offloaded model's memory a parameter takes."""
    return sum(residency.memory_for([parameter]) for residency in residencies([parameter]))


def _gradients(parameters: Iterable[torch.Tensor]) -> list[SpilledGradients]:
    found = (residency.gradients for residency in residencies(parameters))
    return [gradients for gradients in found if gradients is not None]
