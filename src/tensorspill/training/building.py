"""`init`: building a model straight into the spill file."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from tensorspill.errors import UnsupportedError
from tensorspill.pool.trim import trim
from tensorspill.residency.statistics import spillable
from tensorspill.residency.uses import UseMode
from tensorspill.spill.file import Folder
from tensorspill.swap.swapper import ParameterSwapper, SwapStatus
from tensorspill.training.offloading import attach, divided
from tensorspill.training.options import OffloadOptions, check_options

__all__ = ["init"]

log = logging.getLogger(__name__)

#: Of a storage that only a parameter and the question about it refer to.
_UNSHARED = 2


@contextmanager
def init(
    folder: Folder | Sequence[Folder],
    resident: int | str = "4GiB",
    *,
    values: bool = True,
    device: str | torch.device = "cpu",
    **options: Any,
) -> Iterator[None]:
    """Return a context in which one model is built that never is in memory as a whole.

    Parameters go to the drive as soon as they take more than `resident`, the longest unused first,
    and come back when code that initialises them uses them. At the end the model is what `offload`
    makes of it, with the same values that it would have without.

    Parameters
    ----------
    folder, resident, **options
        See `offload`; ``blocks`` can't be given, since there are none yet.
    values : bool
        If not, large parameters are on the meta device while the model is built, and NaN after it:
        for a model whose values will be loaded.
    device : str or torch.device
        Where the model is built and will compute.

    Raises
    ------
    CapacityError, UnsupportedError, BrokenError
        As `offload`; or nothing with parameters was built. What was built is then of no use.

    Notes
    -----
    Of several modules built inside the one with most parameters is offloaded; others are ordinary.

    Examples
    --------
    >>> with init("/mnt/nvme", "4GiB"):  # doctest: +SKIP
    ...     model = GPT(config)
    """
    asked = check_options(folder, resident, **options)
    if asked.blocks is not None:
        raise UnsupportedError("There are no blocks yet that could be given")
    swapper = asked.open_swapper(0, str(device))
    builder = _Builder(swapper, asked, values)
    try:
        with builder.building(torch.device(device)):
            yield
        model = builder.finish()
        division = divided(model, asked)
        swapper.rebudget(division.parameters)
        builder.bring_back(_outside(model, division.blocks, asked))
        attach(model, swapper, division, asked)
        trim()
    except BaseException:
        swapper.close()
        raise


class _Builder:
    """Spills parameters while a model is built, and brings those that are used.

    They visit ordinary memory, not the swapper's budget: what is built is not known yet.
    """

    def __init__(self, swapper: ParameterSwapper, options: OffloadOptions, values: bool) -> None:
        self._swapper = swapper
        self._options = options
        self._values = values
        self._thread = threading.get_ident()
        #: All that were made, those in memory the longest unused first.
        self._here: dict[nn.Parameter, None] = {}
        self._away: dict[nn.Parameter, None] = {}
        self._nbytes = 0
        self._emptied: Any = WeakTensorKeyDictionary()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextmanager
    def building(self, device: torch.device) -> Iterator[None]:
        """Return the context in which modules are noted."""
        # Its type doesn't say that a parameter may be returned.
        register: Any = register_module_parameter_registration_hook
        with ExitStack() as stack:
            for handle in (
                register(self._parameter),
                register_module_module_registration_hook(self._module),
            ):
                stack.callback(handle.remove)
            if device.type != "cpu":
                stack.enter_context(device)
            stack.enter_context(UseMode(self._before, self._make_room))
            yield

    def finish(self) -> nn.Module:
        """Return the model; parameters of anything else are brought back, or forgotten.

        Raises
        ------
        UnsupportedError
            Nothing with parameters was built.
        """
        roots = [module for module in self._modules if module not in self._inner]
        sizes = {root: sum(p.nbytes for p in root.parameters()) for root in roots}
        model = max(roots, key=lambda root: sizes[root], default=None)
        if model is None or not sizes[model]:
            raise UnsupportedError("No module with parameters was built")
        mine = set(model.parameters())
        self.bring_back([p for p in self._away if p not in mine])
        if not self._values:
            self._fill(model)
        return model

    def bring_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bring parameters to ordinary memory for good."""
        for parameter in parameters:
            if self._swapper.status(parameter) is SwapStatus.NOT_AVAILABLE:
                self._bring(parameter)
                self._swapper.forget([parameter])

    # -- what is built -----------------------------------------------------------------------------

    def _parameter(self, module: nn.Module, _: str, parameter: Any) -> nn.Parameter | None:
        if threading.get_ident() != self._thread:
            return None
        self._modules.add(module)
        if type(parameter) is not nn.Parameter or not self._options.swappable(parameter):
            return None
        if not self._values and parameter.device.type != "meta":
            if parameter not in self._emptied:  # else it is assigned once more: tied
                with torch.no_grad():
                    meta = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                self._emptied[parameter] = meta
            emptied: nn.Parameter = self._emptied[parameter]
            return emptied
        self._note(parameter)
        return None

    def _module(self, module: nn.Module, _: str, inner: Any) -> None:
        if threading.get_ident() != self._thread or not isinstance(inner, nn.Module):
            return
        self._modules.add(module)
        self._inner.add(inner)
        for parameter in inner.parameters():  # those of a module that was copied
            if type(parameter) is nn.Parameter and self._options.swappable(parameter):
                self._note(parameter)

    def _note(self, parameter: nn.Parameter) -> None:
        if parameter in self._here or parameter in self._away:
            return
        if parameter.device == self._swapper.file.device:
            self._here[parameter] = None
            self._nbytes += parameter.nbytes

    def _before(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                if tensor in self._away:
                    self._bring(tensor)
                if tensor in self._here:  # now the latest
                    self._here[tensor] = self._here.pop(tensor)

    def _bring(self, parameter: nn.Parameter) -> None:
        memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self._swapper.swap_in([parameter], wait=True, buffers=[memory])
        del self._away[parameter]
        self._here[parameter] = None
        self._nbytes += parameter.nbytes

    def _make_room(self) -> None:
        """Spill the longest unused half, once the budget is exceeded."""
        if self._nbytes <= self._options.resident:
            return
        leaving: list[nn.Parameter] = []
        for parameter in self._here:
            if self._nbytes <= self._options.resident // 2:
                break
            if _unshared(parameter):
                leaving.append(parameter)
                self._nbytes -= parameter.nbytes
        if not leaving:
            return
        self._swapper.swap_out(leaving)
        trim()
        for parameter in leaving:
            del self._here[parameter]
            self._away[parameter] = None

    # -- without values ----------------------------------------------------------------------------

    def _fill(self, model: nn.Module) -> None:
        """Put parameters that are NaN, on the drive, in place of those on the meta device."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.device.type != "meta":
                    continue
                if parameter not in made:
                    made[parameter] = self._nothing(parameter)
                module._parameters[name] = made[parameter]

    def _nothing(self, meta: nn.Parameter) -> nn.Parameter:
        fill = torch.nan if meta.dtype.is_floating_point or meta.dtype.is_complex else 0
        device = self._swapper.file.device
        data = torch.full(meta.shape, fill, dtype=meta.dtype, device=device)
        parameter = nn.Parameter(data, meta.requires_grad)
        del data
        self._swapper.swap_out([parameter])
        self._away[parameter] = None
        return parameter


def _unshared(parameter: nn.Parameter) -> bool:
    """Whether nobody else has the parameter's memory, who would miss it."""
    storage: Any = parameter.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= _UNSHARED)


def _outside(
    model: nn.Module, blocks: Sequence[nn.Module], options: OffloadOptions
) -> list[nn.Parameter]:
    """Return the parameters that stay in memory."""
    spilled = spillable(model, blocks, options.swappable)
    return [parameter for parameter in model.parameters() if parameter not in spilled]
