"""Finding the blocks of a model: what is fetched and let go as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn

from tensorspill.residency.entry import cost

__all__ = ["find_blocks"]

#: Never called themselves: their parent uses their content.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


def find_blocks(
    model: nn.Module, limit: int, swappable: Callable[[nn.Parameter], bool]
) -> list[nn.Module]:
    """Return modules to spill, in the order in which the model has them.

    The repeated modules of a ModuleList or Sequential, the outermost that are small enough; beside
    them, and inside of those that are too large, modules with parameters of their own. What is in
    none of them stays in memory: parameters that the model itself has, for instance.

    Parameters
    ----------
    model : torch.nn.Module
        May be on the meta device.
    limit : int
        Bytes that a block should have at most; single modules may be larger.
    swappable : callable
        Whether a parameter is worth it.
    """
    return list(dict.fromkeys(_Finder(limit, swappable).inside(model)))


class _Finder:
    def __init__(self, limit: int, swappable: Callable[[nn.Parameter], bool]) -> None:
        self._limit = limit
        self._swappable = swappable

    def inside(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the blocks among the modules inside of one that is none."""
        repeated = _repeated(module)
        children = [child for child in module.children() if self._size(child)]
        if not children and not _is_container(module) and self._size(module):
            yield module  # a model that is one layer
        for child in children:
            if self._is_block(child, type(child) in repeated):
                yield child
            elif any(True for _ in child.children()):
                yield from self.inside(child)

    def _is_block(self, module: nn.Module, repeated: bool) -> bool:
        if _is_container(module):
            return False
        if not any(True for _ in module.children()):
            return True
        if self._size(module) > self._limit:
            return False
        return repeated or (_has_own(module) and not any(map(_repeated, module.modules())))

    def _size(self, module: nn.Module) -> int:
        return sum(cost(p) for p in module.parameters() if self._swappable(p))


def _is_container(module: nn.Module) -> bool:
    called = type(module).forward is not nn.Module.forward
    return not called or isinstance(module, _CONTAINERS + _PARAMETER_CONTAINERS)


def _has_own(module: nn.Module) -> bool:
    own = any(True for _ in module.parameters(recurse=False))
    return own or any(isinstance(child, _PARAMETER_CONTAINERS) for child in module.children())


def _repeated(module: nn.Module) -> set[type[nn.Module]]:
    """Return the types of which a sequence has several modules."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return set()
    counts = Counter(type(child) for child in module.children())
    return {kind for kind, count in counts.items() if count > 1}
