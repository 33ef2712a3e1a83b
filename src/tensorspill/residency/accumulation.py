"""Being told when autograd adds to parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch

__all__ = ["Accumulation"]

Told = Callable[[torch.Tensor], None]


class Accumulation:
    """Calls two methods of an object before and after gradients of parameters are added to.

    Unlike hooks of the tensors themselves, these don't run for `torch.autograd.grad`, which adds to
    nothing. The parameters don't keep the object.

    Parameters
    ----------
    before, after : callable
        Bound methods, called with the parameter.
    """

    def __init__(self, before: Told, after: Told) -> None:
        self._before = WeakMethod(before)
        self._after = WeakMethod(after)
        #: Autograd's, which forgets their hooks if nobody keeps them.
        self._nodes: list[Any] = []
        self._handles: list[Any] = []

    def watch(self, parameter: torch.Tensor) -> None:
        """Call the methods for one more parameter."""
        with torch._C.DisableTorchFunction():
            node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
        self._nodes.append(node)
        hooked: Any = parameter  # its methods have no types
        self._handles += [
            node.register_prehook(partial(_tell, self._before, parameter)),
            hooked.register_post_accumulate_grad_hook(partial(_tell, self._after)),
        ]

    def remove(self) -> None:
        """Call the methods no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


def _tell(method: WeakMethod[Told], parameter: torch.Tensor, *_: object) -> None:
    told = method()
    if told is not None:
        told(parameter)
