"""Converting many tensors into many others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tensorspill.errors import UnsupportedError
from tensorspill.pool.kernels import triton_launch

__all__ = ["cast"]

Pair = tuple[torch.Tensor, torch.Tensor]


def cast(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Write each source into its target, converted to the target's dtype as torch would.

    float32 becomes bfloat16 or float16 rounded to the nearest value, ties to even; what is too
    large becomes infinite, and NaN stays NaN. Between these dtypes, all pairs in the memory of a
    GPU are converted by one launch of a kernel for each combination of dtypes. On the CPU, and for
    every other combination, torch copies the batch: on two cores that moved as many bytes a second
    as compiled loops, and more on several threads.

    Parameters
    ----------
    sources, targets : sequences of torch.Tensor
        As many targets as sources, each with its source's number of elements, in any dtypes, of any
        layout, on any devices. No target may share memory with a source or another target, except
        that each may be its own source.

    Raises
    ------
    UnsupportedError
        The sequences don't match; nothing was written.

    Notes
    -----
    On GPUs the work is queued on the current stream of the targets' device, and this returns before
    it is done.
    """
    pairs = _matched(sources, targets)
    with torch.no_grad():
        for kind, group in _grouped(pairs).items():
            origins, places = [pair[0] for pair in group], [pair[1] for pair in group]
            if kind is None:
                _copy(origins, places)
            else:
                _launch(kind, origins, places)


def _matched(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[Pair]:
    if len(sources) != len(targets):
        raise UnsupportedError(f"{len(sources)} tensors can't be cast into {len(targets)}")
    pairs = []
    for source, target in zip(sources, targets, strict=True):
        if source.numel() != target.numel():
            raise UnsupportedError(
                f"A tensor of {source.numel()} elements can't be cast into {target.numel()}"
            )
        pairs.append((source.detach(), target.detach()))
    return pairs


Group = tuple[torch.device, tuple[str, str, str]] | None


def _grouped(pairs: list[Pair]) -> dict[Group, list[Pair]]:
    """Return the pairs by what converts them: a kernel on a device, or None for torch."""
    groups: dict[Group, list[Pair]] = {}
    host = triton_launch.interpreted()
    if not host and not any(target.is_cuda for _, target in pairs):
        return {None: pairs} if pairs else {}
    for source, target in pairs:
        kind = triton_launch.KINDS.get((source.dtype, target.dtype))
        on_device = target.is_cuda or (host and target.is_cpu)
        if kind is None or not on_device or not _plain(source, target):
            groups.setdefault(None, []).append((source, target))
        else:
            groups.setdefault((target.device, kind), []).append((source, target))
    return groups


def _plain(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether both lie on one device, as arrays of whole elements."""
    return source.device == target.device and all(
        tensor.is_contiguous() and not tensor.is_neg() and not tensor.data_ptr() % tensor.itemsize
        for tensor in (source, target)
    )


def _launch(
    kind: tuple[torch.device, tuple[str, str, str]],
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> None:
    device, conversion = kind
    with triton_launch.on_device(device):
        triton_launch.attempt(
            partial(triton_launch.launch_cast, conversion, sources, targets),
            partial(_copy, sources, targets),
        )


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Let torch copy all, in one call that loops over them below Python."""
    shaped = [
        source if source.shape == target.shape else source.reshape(target.shape)
        for source, target in zip(sources, targets, strict=True)
    ]
    torch._foreach_copy_(list(targets), shaped)
