"""The wrapped optimizer, run on a few parameters at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tensorspill.errors import UnsupportedError

__all__ = ["SEPARABLE", "Group", "Layout", "Wrapped", "from_scaler", "same_choice"]

Group = dict[str, Any]
#: Of each tensor of state the bytes of an element, and for each dimension whether it is as long as
#: the parameter's, else 1.
Layout = tuple[tuple[int, tuple[bool, ...]], ...]

#: Each updates a parameter from nothing but that parameter, its gradient, its own state and the
#: group's settings, and evaluates the closure once: tests step them together and one by one.
SEPARABLE = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)

#: What a `torch.amp.GradScaler` sets on an optimizer that unscales gradients itself.
_FROM_SCALER = ("grad_scale", "found_inf")

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Wrapped:
    """An optimizer of a class of torch's, whose parameters are exchanged from step to step.

    Parameters
    ----------
    cls : type
        Of the optimizer.
    groups : sequence of dict
        The user's groups; only the settings in them are used, and the kinds of their parameters.
    defaults : mapping
        Settings of all groups that don't say otherwise.
    separable : bool
        Take the user's word that a class which is not torch's can be stepped in parts.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
        Its `state` is all parameters' state.
    eager : bool
        Whether the class makes state when it is made, and not in a parameter's first step.

    Raises
    ------
    UnsupportedError
        The optimizer couples parameters, evaluates a closure several times, or may do so.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        groups: Sequence[Group],
        defaults: Mapping[str, Any],
        separable: bool,
    ) -> None:
        _check_class(cls, separable)
        if defaults.get("differentiable") or any(group.get("differentiable") for group in groups):
            raise UnsupportedError("A spilled optimizer can't be differentiated through")
        self._cls = cls
        self._given = dict(defaults)
        stand_ins = [{**group, "params": _stand_ins(group["params"])} for group in groups]
        self.optimizer = cls(stand_ins, **self._given)
        self.eager = bool(self.optimizer.state)
        self.optimizer.state.clear()
        self.optimizer.param_groups.clear()
        # Without the hooks that torch runs around each step, which are the caller's to run.
        step: Any = cls.step
        self._step: Callable[[torch.optim.Optimizer], Any] = (
            step.__wrapped__ if getattr(step, "hooked", False) else step
        )

    @property
    def state(self) -> dict[torch.Tensor, Group]:
        """All parameters' state."""
        state: dict[torch.Tensor, Group] = self.optimizer.state
        return state

    @torch.no_grad()
    def step(self, groups: Sequence[Group], scaler: Mapping[str, Any]) -> None:
        """Do for the parameters of these groups, and no others, what the optimizer's step does.

        Parameters
        ----------
        groups : sequence of dict
            With all settings.
        scaler : mapping
            What `from_scaler` returned.
        """
        optimizer = self.optimizer
        if self.eager:
            self.make_state(groups)
        optimizer.param_groups = list(groups)
        vars(optimizer).update(scaler)
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups = []
            for name in scaler:
                delattr(optimizer, name)

    def make_state(self, groups: Sequence[Group]) -> None:
        """Make the state that an eager class has of parameters before their first step."""
        for group in groups:
            fresh = [p for p in group["params"] if p not in self.state]
            if fresh:
                made = self._cls([{**group, "params": fresh}], **self._given)
                self.state.update(made.state)

    def adopt_settings(self, state: dict[torch.Tensor, Group], groups: Sequence[Group]) -> None:
        """Take over loaded state and settings as the class does; `groups` gets what they lack."""
        optimizer: Any = self.optimizer
        kept = defaultdict(dict, state)
        optimizer.__setstate__({"state": kept, "param_groups": list(groups)})
        optimizer.param_groups = []

    def layout(self, group: Group, parameter: torch.Tensor) -> Layout:
        """Return of what form each tensor of a parameter's state is.

        Found out by a step with a tiny stand-in, so whatever keeps the real step from being taken,
        such as ``fused`` with a dtype that has no kernel, is raised here.
        """
        shape = (3,) * parameter.ndim
        tiny = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
        tiny.grad = torch.zeros_like(tiny)
        if self._cls is torch.optim.SparseAdam:
            tiny.grad = tiny.grad.to_sparse()
        settings = {key: value for key, value in group.items() if key != "param_names"}
        optimizer = self._cls([{**settings, "params": [tiny]}], **self._given)
        self._step(optimizer)
        return tuple(
            (value.element_size(), tuple(size == 3 for size in value.shape))
            for value in optimizer.state[tiny].values()
            if isinstance(value, torch.Tensor) and value.ndim == tiny.ndim > 0
        )


def from_scaler(owner: object) -> dict[str, Any]:
    """Return what a gradient scaler has set on an optimizer for its next step."""
    return {name: getattr(owner, name) for name in _FROM_SCALER if hasattr(owner, name)}


def same_choice(group: Group, parameters: Iterable[torch.Tensor]) -> Group:
    """Return a group's settings with the choice of kernels that torch makes for all of it.

    Where the user leaves it to torch, one tensor subclass among the parameters keeps all of them
    from foreach; in parts, the others would get it.
    """
    kinds = {type(parameter) in _PLAIN for parameter in parameters}
    if len(kinds) == 2 and group.get("foreach", True) is None and not group.get("fused"):
        return {**group, "foreach": False}
    return group


def _check_class(cls: Any, separable: bool) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UnsupportedError(f"{cls!r} is no class of optimizers")
    if separable or any(cls is getattr(torch.optim, name, None) for name in SEPARABLE):
        return
    if cls is torch.optim.LBFGS:
        raise UnsupportedError(
            "LBFGS couples all parameters and evaluates its closure several times: it can't be "
            "stepped in parts",
            remedy=f"Use one of {', '.join(SEPARABLE)}",
        )
    raise UnsupportedError(
        f"{cls.__module__}.{cls.__qualname__} is not known to update each parameter on its own",
        remedy="If it does, and evaluates its closure once, say separable=True",
    )


def _stand_ins(parameters: Any) -> list[Any]:
    """Return empty tensors of the kinds of `parameters`, for checks that look at these only."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]
    return [
        torch.empty((0,) * entry.ndim, dtype=entry.dtype, device=entry.device)
        if isinstance(entry, torch.Tensor)
        else entry
        for entry in tensors
    ]
