"""Which plain tensors are known to be equal on several ranks: those under DDP.

A plain tensor says nothing about other ranks: two with one name may well differ, as the running
statistics of BatchNorm do under DistributedDataParallel (DDP), or the generator's state. Cutting
such a tensor among writers would mix the ranks' values. So a tensor counts as replicated only

- if its memory is that of a parameter of a live DDP module that DDP keeps in step (not one of its
  ``parameters_to_ignore``): it is replicated on the ranks of that module's process group;
- or if it is in the state of a live optimizer, at such a parameter: there it follows from equal
  gradients and equal steps;
- or if the user says so, by the name of the tensor.

Live modules and optimizers are found among the objects that Python's garbage collector tracks. That
takes a while in a large process, so it is done only if the state is not the one that was saved
before.
"""

from __future__ import annotations

import fnmatch
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tensorspill.checkpoint.distributed.description import Claim
from tensorspill.errors import UnsupportedError

__all__ = ["Replicas", "mark", "patterns"]

# Address, bytes: memory is known by where it is, since state dictionaries hold other tensors on it.
_Memory = tuple[int, int]


class Replicas:
    """Knows which tensors are replicated, as far as that is known at all.

    Parameters
    ----------
    vouched : iterable of str
        Patterns of names, as `fnmatch` has them, of tensors that are equal on all ranks that hold
        them.
    ranks : sequence of int
        Global ranks of the group that saves.
    search : bool
        Look for DDP modules and optimizers.
    """

    def __init__(self, vouched: Iterable[str], ranks: Iterable[int], search: bool = True) -> None:
        self._vouched = patterns(vouched)
        self._group = tuple(sorted(ranks))
        #: Whether there is anything to look for.
        self.searches = search and len(self._group) > 1
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: dict[_Memory, Claim] = {}

    def look(self, everywhere: bool) -> None:
        """Learn where the memory of parameters and their optimizers' state is now.

        Parameters
        ----------
        everywhere : bool
            Look for modules and optimizers that were not known before.
        """
        self._known = {}
        if not self.searches:
            return
        if everywhere:
            self._find()
        parameters: dict[int, Claim] = {}
        for module in list(self._modules):
            for parameter, claim in _kept_in_step(module):
                parameters[id(parameter)] = claim
                self._add(parameter, claim)
        for optimizer in list(self._optimizers) if parameters else ():
            for parameter, state in optimizer.state.items():
                found = parameters.get(id(parameter))
                if found is not None and isinstance(state, dict):
                    self._add_state(state, found)

    def claim(self, name: str, tensor: torch.Tensor) -> Claim | None:
        """Return what is known about a plain tensor of that name."""
        marked = getattr(tensor, _MARK, None)
        if isinstance(marked, Claim):
            return marked
        if self._known and (found := self._known.get(_memory(tensor))) is not None:
            return found
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._vouched):
            return Claim(self._group, f"vouched for: {name}")
        return None

    def _find(self) -> None:
        ddp, optimizer = torch.nn.parallel.DistributedDataParallel, torch.optim.Optimizer
        # An object refers to its class. To go through gc.get_objects() instead would make other
        # threads fail: a tuple that one of them is just filling must be nobody else's.
        for item in gc.get_referrers(*_with_subclasses(ddp), *_with_subclasses(optimizer)):
            # Not isinstance, which runs code of whatever object this is.
            bases = type(item).__mro__
            if ddp in bases:
                self._modules.add(item)
            elif optimizer in bases:
                self._optimizers.add(item)

    def _add(self, tensor: torch.Tensor, claim: Claim) -> None:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.nbytes:
            self._known[_memory(tensor)] = claim

    def _add_state(self, state: dict[Any, Any], claim: Claim) -> None:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                self._add(value, claim._replace(why=f"{claim.why}, optimizer's {key}"))


def _with_subclasses(cls: type[Any]) -> list[type[Any]]:
    """Return a class and all that derive from it."""
    found = [cls]
    for child in cls.__subclasses__():
        found += _with_subclasses(child)
    return found


def patterns(vouched: Iterable[str]) -> tuple[str, ...]:
    """Return patterns of names as they are kept.

    Raises
    ------
    UnsupportedError
        It is one text, whose letters would be patterns.
    """
    if isinstance(vouched, str):
        raise UnsupportedError(f"Names of replicated tensors are a list: [{vouched!r}]")
    return tuple(vouched)


_MARK = "_tensorspill_claim"


def mark(tensor: torch.Tensor, claim: Claim | None) -> None:
    """Let a tensor that is a copy of another one carry what was known of that."""
    if claim is not None:
        setattr(tensor, _MARK, claim)


def _memory(tensor: torch.Tensor) -> _Memory:
    return tensor.data_ptr(), tensor.nbytes


def _kept_in_step(module: Any) -> Iterable[tuple[torch.nn.Parameter, Claim]]:
    """Return the parameters of a DDP module that it keeps equal, each with its claim."""
    import torch.distributed as dist

    group = getattr(module, "process_group", None)
    if group is None or not dist.is_initialized():
        return
    try:
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    except (RuntimeError, ValueError, KeyError):
        return  # of a process group that was destroyed
    for name, parameter in module.module.named_parameters():
        if name not in module.parameters_to_ignore and not getattr(
            parameter, "_ddp_ignored", False
        ):
            yield parameter, Claim(ranks, f"DDP's {name}")
