"""What stands for a gradient that a step has used up before backward was over."""

from __future__ import annotations

from typing import Any, Self

import torch

from tensorspill.errors import UnsupportedError
from tensorspill.residency.uses import looks_at_values

__all__ = ["SpentGradient"]


class SpentGradient(torch.Tensor):
    """Is ``parameter.grad`` after the parameter was stepped in backward, until ``zero_grad``.

    It has the gradient's shape and dtype, and no memory. Shape and the like may be asked for; what
    needs the values, such as clipping or a gradient scaler, raises UnsupportedError.
    """

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Self:
        """Return what stands for the gradient of `parameter`."""
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        return nothing.expand(parameter.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what looks at values."""
        if looks_at_values(func):
            raise UnsupportedError(
                "This gradient was used by the optimizer's step in backward, and given up",
                remedy="What needs all gradients when backward is over, such as clipping them by "
                "their norm or a gradient scaler, takes a SpilledOptimizer without in_backward",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SpentGradient(shape={tuple(self.shape)}, dtype={self.dtype})"
