"""Watching a model's first forward for parameters that are used outside of their block."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tensorspill.residency import Residency
from tensorspill.residency.uses import UseMode

__all__ = ["ForwardWatch"]

log = logging.getLogger(__name__)


class ForwardWatch:
    """Keeps in memory what a block's hooks can't bring in time.

    A model may use a weight without calling the module that has it: an embedding as the last
    layer's weight, say. The first forward of each kind (training or not, with gradients or without)
    is watched for that; such a parameter is brought, and stays in memory.

    Parameters
    ----------
    model : torch.nn.Module
        Its forward is wrapped, until `remove`.
    residency : Residency
    """

    def __init__(self, model: nn.Module, residency: Residency) -> None:
        self._model = model
        self._residency = residency
        self._seen: set[tuple[bool, bool]] = set()
        self._forward = model.forward
        self._own = "forward" in model.__dict__

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        self._wrapped = forward
        model.__dict__["forward"] = forward

    def remove(self) -> None:
        """Give the model its own forward back; a second time does no harm."""
        if self._model.__dict__.get("forward") is self._wrapped:
            if self._own:
                self._model.__dict__["forward"] = self._forward
            else:
                del self._model.__dict__["forward"]

    def _run(self, args: Any, kwargs: Any) -> Any:
        kind = self._model.training, torch.is_grad_enabled()
        if kind in self._seen:
            return self._forward(*args, **kwargs)
        with UseMode(self._check):
            result = self._forward(*args, **kwargs)
        self._seen.add(kind)
        return result

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._residency.entered:
            return
        for tensor in tensors:
            if not self._residency.holds(tensor):
                self._residency.keep([tensor])
                log.warning(
                    "Parameter %s is used outside of its module's call: it stays in memory",
                    self._residency.name_of(tensor),
                )
