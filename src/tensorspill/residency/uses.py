"""Seeing which parameters a function of torch is about to use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["UseMode", "looks_at_values", "used"]

#: Attributes that give access to the values; all others are about shape, dtype and so on.
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
#: Methods that don't look at the values.
_HARMLESS = frozenset(
    (
        "__delete__",
        "__hash__",
        "__len__",
        "__set__",
        "_is_view",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_pinned",
        "is_shared",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "size",
        "storage_offset",
        "stride",
        "untyped_storage",
    )
)


class UseMode(TorchFunctionMode):
    """Tells of tensors before a function uses their values.

    Parameters
    ----------
    before : callable
        Called with the tensors in the arguments.
    after : callable, optional
        Called when the function has returned.
    """

    def __init__(
        self,
        before: Callable[[Sequence[torch.Tensor]], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._before = before
        self._after = after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` between `before` and `after`."""
        kwargs = kwargs or {}
        if not looks_at_values(func):
            return func(*args, **kwargs)
        self._before(list(used((args, kwargs))))
        try:
            return func(*args, **kwargs)
        finally:
            if self._after is not None:
                self._after()


def used(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from used(argument)
    elif isinstance(arguments, dict):
        yield from used(list(arguments.values()))


def looks_at_values(func: Any) -> bool:
    """Whether a function of torch may look at the values of its tensors, or change them."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _VALUES
    return name not in _HARMLESS
