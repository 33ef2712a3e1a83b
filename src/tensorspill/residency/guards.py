"""Refusals of what would copy or change placeholders in place of parameters."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensorspill.errors import UnsupportedError
from tensorspill.residency.registry import residency_of

__all__ = ["Uncopyable", "guard", "unguard", "watch_optimizers"]

_REFUSED = ("__deepcopy__", "__reduce_ex__")


class Uncopyable:
    """What hangs on a module and must not be copied or pickled with it."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_copy(memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(protocol)


def guard(parameter: torch.Tensor) -> None:
    """Refuse to copy a spilled parameter deeply, or to pickle it, and with it any module of it."""
    for name in _REFUSED:
        setattr(parameter, name, _refuse_copy)


def unguard(parameter: torch.Tensor) -> None:
    """Undo `guard`; without it no harm is done."""
    for name in _REFUSED:
        parameter.__dict__.pop(name, None)


def _refuse_copy(_: Any) -> NoReturn:
    raise UnsupportedError(
        "A parameter in the spill file can't be copied deeply or pickled",
        remedy="Copy the model before it is offloaded, or use its state_dict",
    )


_watching = False


def watch_optimizers() -> None:
    """Let every optimizer check from now on that it doesn't step on placeholders.

    Its kernels would write past their one element.
    """
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if getattr(optimizer, "brings_parameters", False):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            residency = residency_of(parameter)
            if residency is not None and not residency.holds(parameter):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} would change parameters that are on the drive",
                    remedy="Use SpilledOptimizer, or an optimizer for each block inside of "
                    "`updating(block)`",
                )
