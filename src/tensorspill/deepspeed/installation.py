"""Making DeepSpeed use this library's engines, and undoing it."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from typing import Any

from tensorspill.deepspeed.operators import modules
from tensorspill.errors import UnsupportedError

__all__ = ["SUPPORTED", "install", "uninstall"]

log = logging.getLogger(__name__)

#: Releases that were tried: from the first to below the second.
SUPPORTED = ((0, 19), (0, 20))

_SWAPPER = "deepspeed.runtime.swap_tensor.partitioned_param_swapper"
_WRITERS = "deepspeed.runtime.model_checkpointing.data_parallel_writer_factory"
#: Where DeepSpeed keeps the module with which it pins memory, for all that load it.
_PIN_CACHE = "_deepspeed_pin_memory_op_module"

_ABSENT = object()
#: What was there before: (holder, name, value).
_changed: list[tuple[Any, str, Any]] = []


def install(*, swapper: bool = False, writers: bool = False, any_version: bool = False) -> None:
    """Give DeepSpeed this library's engines; a second time does no harm.

    Call it before DeepSpeed is initialised, in every rank.

    Parameters
    ----------
    swapper : bool
        Replace the parameter swapper of ``offload_param: nvme`` too, by
        `AsyncPartitionedParameterSwapper`.
    writers : bool
        Replace the choice of checkpoint writers too, by `DataParallelWriterFactory`.
    any_version : bool
        Don't insist on a release that was tried.

    Raises
    ------
    UnsupportedError
        DeepSpeed is not installed, or of a release that was not tried; nothing changed.
    """
    _check_version(any_version)
    if not _changed:
        _install_operators()
    if swapper:
        from tensorspill.deepspeed.param_swapper import AsyncPartitionedParameterSwapper

        _replace_everywhere(_SWAPPER, AsyncPartitionedParameterSwapper)
    if writers:
        from tensorspill.deepspeed.writers import GatheredWriterFactory

        _replace_everywhere(_WRITERS, GatheredWriterFactory, "DataParallelWriterFactory")


def uninstall() -> None:
    """Put back what `install` replaced; handles that exist go on working."""
    while _changed:
        holder, name, value = _changed.pop()
        if isinstance(holder, dict):
            if value is _ABSENT:
                holder.pop(name, None)
            else:
                holder[name] = value
        elif value is _ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, value)


def _check_version(any_version: bool) -> None:
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnsupportedError(
            "DeepSpeed is not installed", remedy="pip install deepspeed"
        ) from error
    first, beyond = SUPPORTED
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdecimal())
    if any_version or first <= numbers < beyond:
        return
    raise UnsupportedError(
        f"DeepSpeed {found} was not tried; {_dotted(first)} to below {_dotted(beyond)} were",
        remedy="Install one of those, or pass any_version=True",
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _install_operators() -> None:
    ops = modules()
    builder = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
    for name, module in ops.items():
        _set_item(builder._loaded_ops, name, module)
    _set(sys, _PIN_CACHE, ops["pin_memory"])
    for cls in _subclasses(builder):
        # A host without libaio or a compiler would be found incompatible.
        if getattr(cls, "NAME", None) in ops:
            _set(cls, "is_compatible", _compatible)
            _set(cls, "load", _load)
    # Made when it is first asked for, which takes compilers; what was asked before is put right.
    probed = vars(importlib.import_module("deepspeed.ops")).get("__compatible_ops__")
    for name in ops:
        if probed is not None and name in probed:
            _set_item(probed, name, True)


def _compatible(*_: Any, **__: Any) -> bool:
    """Stand in for ``is_compatible``: what is installed needs nothing of the host."""
    return True


def _load(self: Any, *_: Any, **__: Any) -> Any:
    """Stand in for ``load``: one module for each name, whatever package the builder is from."""
    return importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder._loaded_ops[
        self.NAME
    ]


def _subclasses(cls: type[Any]) -> list[type[Any]]:
    """Return all builders that exist, those of the CPU and other accelerators included."""
    importlib.import_module("deepspeed.ops.op_builder.all_ops")
    importlib.import_module("deepspeed.ops.op_builder.cpu")
    found: list[type[Any]] = []
    for below in cls.__subclasses__():
        found += [below, *_subclasses(below)]
    return list(dict.fromkeys(found))


def _replace_everywhere(module: str, ours: type, name: str | None = None) -> None:
    """Replace a class where it is defined and wherever DeepSpeed has imported it from."""
    name = name or ours.__name__
    theirs = getattr(importlib.import_module(module), name)
    if theirs is ours:
        return
    for loaded in [m for n, m in sys.modules.items() if n.startswith("deepspeed.")]:
        if vars(loaded).get(name) is theirs:
            _set(loaded, name, ours)


def _set(holder: Any, name: str, value: Any) -> None:
    _changed.append((holder, name, vars(holder).get(name, _ABSENT)))
    setattr(holder, name, value)


def _set_item(holder: dict[str, Any], name: str, value: Any) -> None:
    _changed.append((holder, name, holder.get(name, _ABSENT)))
    holder[name] = value
