"""`offload`: a model whose parameters live in the spill file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from tensorspill.errors import UnsupportedError
from tensorspill.residency import Residency, residency_of
from tensorspill.spill.file import Folder
from tensorspill.swap.swapper import ParameterSwapper
from tensorspill.training.budget import Division, divide
from tensorspill.training.handle import Offloaded
from tensorspill.training.options import OffloadOptions, check_options

__all__ = ["attach", "divided", "offload"]

Model = TypeVar("Model", bound=nn.Module)


def offload(
    model: Model,
    folder: Folder | Sequence[Folder],
    resident: int | str = "4GiB",
    *,
    blocks: Iterable[nn.Module] | None = None,
    gradients: Literal["memory", "spilled"] = "memory",
    prefetch: int | None = None,
    min_bytes: int | str = "64KiB",
    **options: Any,
) -> Model:
    """Let a model's parameters live on the drive, and visit memory block by block.

    They come before a block's forward and backward and go after it; the next blocks are fetched
    meanwhile, in the order of the last step, as early as measured compute and transfer times ask
    for and the budget allows. Results are equal to training in memory, to the last bit; see
    `Residency` for what works and what doesn't.

    Parameters
    ----------
    model : torch.nn.Module
        On one device, with values. Cast and move it, and wrap it in DDP, before.
    folder : str, path, or sequence of these
        See `SpillFile`; each model and each rank has a file of its own there.
    resident : int or str
        Bytes of parameters in memory, those that stay there included; of spilled gradients as well.
    blocks : iterable of torch.nn.Module, optional
        What to fetch and let go as a whole, in the order of forward. Found if not given: repeated
        modules, and single ones beside them (see `find_blocks`).
    gradients : {"memory", "spilled"}
        Where gradients are between backward and the optimizer's step. Spilled ones take a part of
        `resident`, and need an optimizer that knows them: `SpilledOptimizer`, or
        ``offloaded(model).residency.gradients``.
    prefetch : int, optional
        How many blocks to fetch ahead at most.
    min_bytes : int or str
        Smaller parameters stay in memory.
    **options
        ``backend``, ``verify`` and ``capacity`` of `SpillFile`, and the engine's options.

    Returns
    -------
    torch.nn.Module
        `model`. What else can be done with it: `offloaded`.

    Raises
    ------
    CapacityError
        `resident` is too small for the largest block; says the smallest that works.
    UnsupportedError
        The model is on several devices or on the meta device, has no parameters that could be
        spilled, was offloaded before, or an option is wrong.
    NoSpaceError, BrokenError
        The drive is full, or failed.

    After an error the model is unchanged.

    Notes
    -----
    Optimizers for plain parameters would meet placeholders: use `SpilledOptimizer`, or one for each
    block inside of ``offloaded(model).residency.updating(block)``. A step on placeholders raises
    UnsupportedError, as do deep copies and pickles of the model.

    When the drive fails in the middle of a step, the step raises. Every parameter has its last
    value then, on the drive or still in memory, and training can go on from its checkpoint, or with
    the next step if the drive recovers.

    Examples
    --------
    >>> model = offload(model, "/mnt/nvme", "4GiB")  # doctest: +SKIP
    >>> loss(model(batch)).backward()  # doctest: +SKIP
    """
    asked = check_options(
        folder,
        resident,
        blocks=blocks,
        gradients=gradients,
        prefetch=prefetch,
        min_bytes=min_bytes,
        **options,
    )
    device = _device_of(model)
    division = divided(model, asked)
    swapper = asked.open_swapper(division.parameters, device)
    try:
        attach(model, swapper, division, asked)
    except BaseException:
        swapper.close()
        raise
    return model


def divided(model: nn.Module, options: OffloadOptions) -> Division:
    """Return the blocks of a model and how the budget is divided.

    Raises
    ------
    CapacityError, UnsupportedError
        As `offload`.
    """
    division = divide(
        model,
        options.resident,
        options.blocks,
        options.swappable,
        options.gradients == "spilled",
    )
    if not division.blocks:
        raise UnsupportedError(
            f"This {type(model).__name__} has no module with parameters of "
            f"{options.min_bytes} bytes",
            remedy="Give `min_bytes`, or `blocks`",
        )
    return division


def attach(
    model: nn.Module, swapper: ParameterSwapper, division: Division, options: OffloadOptions
) -> Offloaded:
    """Spill a model's blocks, of which some may be in the spill file already.

    Raises what `offload` does; the model is then what it was.
    """
    residency = Residency(model, division.blocks, swapper, prefetch=options.prefetch)
    try:
        if division.gradients:
            residency.spill_gradients(division.gradients)
    except BaseException:
        residency.close(restore=True)
        raise
    return Offloaded(model, residency, swapper)


def _device_of(model: nn.Module) -> str:
    devices = {parameter.device for parameter in model.parameters()}
    if any(residency_of(parameter) is not None for parameter in model.parameters()):
        raise UnsupportedError("The model was offloaded before", remedy="Close that first")
    if torch.device("meta") in devices:
        raise UnsupportedError(
            "The model has parameters without values, on the meta device",
            remedy="Build it inside of `init(folder, values=False)`, then load it",
        )
    if len(devices) > 1:
        raise UnsupportedError(
            f"The model is on several devices: {', '.join(sorted(map(str, devices)))}",
            remedy="Offload the part on each device by itself",
        )
    return str(devices.pop()) if devices else "cpu"
