"""Master weights: what the wrapped optimizer updates in place of parameters of less precision."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Masters"]


class Masters:
    """A copy of each parameter in another dtype, made in the parameter's first step.

    After each step the parameter is the master, rounded. A parameter that somebody else changes in
    between (by loading a checkpoint into the model, say) is taken over where it differs from that.

    Parameters
    ----------
    dtype : torch.dtype or None
        Of the copies; None for no copies: parameters are updated themselves.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        self._versions: dict[torch.Tensor, int] = {}

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what is updated in place of a parameter, or None if that is yet to be made."""
        if not self.wanted(parameter):
            return parameter
        return self._masters.get(parameter)

    def wanted(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has a master."""
        return self.dtype is not None and parameter.dtype is not self.dtype

    def set(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """Take `master` for that of a parameter; None of its precision is lost."""
        self._masters[parameter] = master
        self._versions.pop(parameter, None)

    def clear(self) -> dict[torch.Tensor, torch.Tensor]:
        """Have no masters any more; return those there were."""
        masters, self._masters, self._versions = self._masters, {}, {}
        return masters

    @torch.no_grad()
    def begin(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is to be updated, with gradients; parameters and masters are in memory."""
        updated = []
        for parameter in parameters:
            if self.wanted(parameter) and self.dtype is not None:
                master = self._current(parameter, self.dtype)
                gradient = parameter.grad
                master.grad = None if gradient is None else gradient.to(self.dtype)
                updated.append(master)
            else:
                updated.append(parameter)
        return updated

    @torch.no_grad()
    def round(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make parameters what their masters are, rounded."""
        for parameter in parameters:
            master = self._masters.get(parameter)
            if master is not None:
                parameter.copy_(master)
                self._versions[parameter] = parameter._version

    def end(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let go of the gradients that `begin` made."""
        for parameter in parameters:
            master = self._masters.get(parameter)
            if master is not None:
                master.grad = None

    def _current(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        master = self._masters.get(parameter)
        if master is None:
            master = self._masters[parameter] = parameter.detach().to(dtype)
        elif parameter._version != self._versions.get(parameter):
            same = parameter == master.to(parameter.dtype)
            master.copy_(torch.where(same, master, parameter.to(dtype)))
        return master
