"""Copies of states for the asynchronous saves of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tensorspill.checkpoint.distributed.group import ranks_of
from tensorspill.checkpoint.distributed.nested import flatten, rebuild
from tensorspill.checkpoint.distributed.replication import Replicas, mark
from tensorspill.checkpoint.staging import Snapshot, Staging, shared_staging
from tensorspill.errors import CapacityError, UnsupportedError

__all__ = ["Stager"]


class Stager:
    """Copies states into pooled memory, one at a time.

    Parameters
    ----------
    staging : Staging, int, str or None
        The memory, or the budget of that which all saves of the process share.
    process_group : torch.distributed.ProcessGroup or None
        The group that saves.
    timeout : float
        Seconds that ranks may take to come to its first save, and that copies may take to be
        written.
    """

    def __init__(
        self, staging: Staging | int | str | None, process_group: Any, timeout: float
    ) -> None:
        self._staging = staging
        self._process_group, self._timeout = process_group, timeout
        self._snapshot: Snapshot | None = None
        self._replicas: Replicas | None = None

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state; waits until the last copy is released.

        What is known of tensors under DDP is known of their copies.

        Raises
        ------
        BusyError
            The last copy was not released within `timeout` seconds.
        CapacityError
            The staging memory does not hold all of it.
        UnsupportedError
            A tensor is of a kind that can't be copied into other memory.
        """
        flat, _ = flatten(state)
        if self._replicas is None:
            self._replicas = Replicas((), ranks_of(self._process_group, self._timeout).ranks)
        self._replicas.look(everywhere=True)
        tensors = {name: v for name, v in flat.items() if isinstance(v, torch.Tensor)}
        snapshot = self._copy([_local(name, tensor) for name, tensor in tensors.items()])
        staged = {
            name: self._like(name, tensor, kept)
            for (name, tensor), kept in zip(tensors.items(), snapshot.copies, strict=True)
            if kept is not None
        }
        for name, value in flat.items():
            if name not in tensors:
                staged[name] = copy.deepcopy(value)
        self._snapshot = snapshot
        return rebuild(state, staged)

    def _copy(self, tensors: list[torch.Tensor]) -> Snapshot:
        staging = self._staging
        if not isinstance(staging, Staging):
            staging = shared_staging(staging)
        # A save that fails before it writes does not say so; it must not be waited for for ever.
        snapshot = staging.snapshot(tensors, wait=self._timeout)
        if None in snapshot.copies:
            held = snapshot.nbytes
            snapshot.release()
            raise CapacityError(
                "The state does not fit into the staging memory",
                asked=sum(tensor.nbytes for tensor in tensors),
                free=held,
                remedy="Give a larger budget, or use tensorspill.checkpoint.async_save",
            )
        return snapshot

    def _like(self, name: str, tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return a copy's memory as a tensor like the one that was copied."""
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return DTensor.from_local(
                *(kept, tensor.device_mesh, tensor.placements),
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        # Copies are kept by the layout of the next snapshot too: the mark is for a view of it.
        view = kept.view(kept.shape)
        mark(view, None if self._replicas is None else self._replicas.claim(name, tensor))
        return view

    def release(self) -> None:
        """Give the memory of the last copy back; a second time does no harm."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.release()


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedError(
            f"Tensor {name!r} is a {type(local).__name__}, which can't be copied here",
            remedy="Give an async_stager of torch's own to async_save",
        )
    return local.detach()
