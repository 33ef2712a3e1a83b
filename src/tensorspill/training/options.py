"""How a model is offloaded: checked options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from tensorspill.errors import UnsupportedError
from tensorspill.pool.sizes import parse_bytes
from tensorspill.residency.entry import is_plain
from tensorspill.residency.staging import modest
from tensorspill.spill.file import Folder
from tensorspill.swap.swapper import ParameterSwapper

__all__ = ["OffloadOptions", "Swappable", "check_options"]

Swappable = Callable[[nn.Parameter], bool]

_GRADIENTS = ("memory", "spilled")


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """What `offload` and `init` are asked for; see `offload`.

    Attributes
    ----------
    folder : str, path, or sequence of these
    resident, min_bytes : int
    blocks : tuple of torch.nn.Module or None
    gradients : {"memory", "spilled"}
    prefetch : int or None
    spill : dict
        For the spill file: backend, verify, capacity, and options of the engine.
    """

    folder: Folder | Sequence[Folder]
    resident: int
    min_bytes: int
    blocks: tuple[nn.Module, ...] | None
    gradients: Literal["memory", "spilled"]
    prefetch: int | None
    spill: dict[str, Any]

    def open_swapper(self, budget: int, device: str) -> ParameterSwapper:
        """Return a swapper for parameters of any dtype."""
        options = modest(self.resident, device, self.spill)
        return ParameterSwapper(
            self.folder, None, budget, min_bytes=self.min_bytes, device=device, **options
        )

    def swappable(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is worth to be spilled."""
        return parameter.nbytes >= max(self.min_bytes, 1) and is_plain(parameter)


def check_options(
    folder: Folder | Sequence[Folder],
    resident: int | str,
    *,
    blocks: Iterable[nn.Module] | None = None,
    gradients: str = "memory",
    prefetch: int | None = None,
    min_bytes: int | str = "64KiB",
    **spill: Any,
) -> OffloadOptions:
    """Return options with sizes in bytes.

    Raises
    ------
    UnsupportedError
        One is out of range. Options of the engine are checked when it is opened.
    """
    if gradients not in _GRADIENTS:
        raise UnsupportedError(f"gradients={gradients!r} is none of {', '.join(_GRADIENTS)}")
    if prefetch is not None and prefetch < 0:
        raise UnsupportedError(f"prefetch={prefetch} is negative")
    return OffloadOptions(
        folder,
        parse_bytes(resident),
        parse_bytes(min_bytes),
        None if blocks is None else tuple(blocks),
        "spilled" if gradients == "spilled" else "memory",
        prefetch,
        spill,
    )
