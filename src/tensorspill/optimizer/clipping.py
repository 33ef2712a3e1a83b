"""Clipping gradients by their norm, also those that live on the drive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from tensorspill.optimizer.visits import (
    bringing_gradients,
    has_spilled_gradient,
    visit_bytes,
    visit_limit,
)

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Do what `torch.nn.utils.clip_grad_norm_` does, bringing gradients that are on the drive.

    The result is the same to the last bit. Gradients are read once for the norm, and read and
    written once more only if they are clipped.

    Returns
    -------
    torch.Tensor
        The norm of all gradients together, before clipping.

    Raises
    ------
    RuntimeError
        The norm is not finite, and `error_if_nonfinite` asks for this; nothing changed.
    SpillError
        A drive failed; some gradients may have been clipped.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    listed = [parameter for parameter in listed if parameter.grad is not None]
    if not any(has_spilled_gradient(parameter) for parameter in listed):
        norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(
            listed, max_norm, norm_type, error_if_nonfinite, foreach
        )
        return norm
    norms: list[torch.Tensor] = []
    for some in _batches(listed):
        with bringing_gradients(some):
            norms += [_norm(p.grad, norm_type, foreach) for p in some if p.grad is not None]
    # As torch does it: the norm of the norms, in the order of the parameters.
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([n.to(norms[0].device) for n in norms]), norm_type
    )
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"The gradients' norm of order {norm_type} is not finite")
    if bool(max_norm / (total + 1e-6) >= 1):
        return total
    for some in _batches(listed):
        with bringing_gradients(some, changing=True):
            torch.nn.utils.clip_grads_with_norm_(some, max_norm, total, foreach)
    return total


def _norm(gradient: torch.Tensor, norm_type: float, foreach: bool | None) -> torch.Tensor:
    """Return a gradient's norm by the kernel that torch would take for all of them."""
    if foreach is not False and type(gradient) is torch.Tensor:
        norm: torch.Tensor = torch._foreach_norm([gradient], norm_type)[0]
    else:
        norm = torch.linalg.vector_norm(gradient, norm_type)
    return norm


def _batches(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield parameters in groups whose gradients can be in memory together."""
    limit, taken, size = visit_limit(parameters), list[torch.Tensor](), 0
    for parameter in parameters:
        nbytes = visit_bytes(parameter)
        if taken and size + nbytes > limit:
            yield taken
            taken, size = [], 0
        taken.append(parameter)
        size += nbytes
    if taken:
        yield taken
