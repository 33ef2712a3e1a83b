"""Gradients that live in the spill file between backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["SpilledGradients"]


class SpilledGradients:
    """The gradients of spilled parameters, on the drive in packed buffers.

    While a gradient is on the drive, ``parameter.grad`` is a placeholder (NaN, without memory), so
    that whoever uses it by mistake notices. Setting ``parameter.grad`` to None, as ``zero_grad``
    does, forgets the gradient; the next backward adds to it otherwise, to the same bits as in
    memory.
    """

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient of this parameter is on the drive, or on its way there."""
        raise NotImplementedError

    def memory_for(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return how many bytes of the budget it takes to bring these parameters' gradients."""
        raise NotImplementedError

    @contextmanager
    def bringing(
        self, parameters: Iterable[torch.Tensor], *, changing: bool = False
    ) -> Iterator[None]:
        """Return a context in which ``parameter.grad`` of each is in memory.

        At its end they are placeholders again, and those that were set to None are forgotten.
        Gradients that are not spilled are left alone. May be nested in
        `Residency.updating_parameters`.

        Parameters
        ----------
        parameters : iterable of torch.nn.Parameter
            Of which those count that have a spilled gradient.
        changing : bool
            Write them back at the end, as after clipping.

        Raises
        ------
        CapacityError
            They don't fit in the budget for gradients together; see `memory_for`.
        SpillError
            A read failed, or an earlier write. Nothing changed.
        """
        raise NotImplementedError
        yield

    def fetch_ahead(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin to read these gradients if there is room; never waits."""
        raise NotImplementedError

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Set these gradients to None, without reading them."""
        raise NotImplementedError
