"""An optimizer whose state lives on the drive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch.optim.optimizer import ParamsT

from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.errors import ClosedError, UnsupportedError
from tensorspill.optimizer.backward import InBackward
from tensorspill.optimizer.masters import Masters
from tensorspill.optimizer.planning import Planner, common_device
from tensorspill.optimizer.portions import Member, Portion
from tensorspill.optimizer.state_dicts import (
    ParameterState,
    States,
    Undigested,
    keep_undigested,
    loaded,
)
from tensorspill.optimizer.states import StateTensors
from tensorspill.optimizer.statistics import OptimizerStatistics
from tensorspill.optimizer.stepping import Stepper
from tensorspill.optimizer.steps import Steps
from tensorspill.optimizer.wrapped import Group, Wrapped, from_scaler
from tensorspill.pool.sizes import parse_bytes
from tensorspill.spill.file import Folder
from tensorspill.swap.swapper import ParameterSwapper

__all__ = ["SpilledOptimizer"]


class SpilledOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer of torch's: the same numbers to the last bit, with its state on a drive.

    A step goes portion by portion, each some parameters whose state is a fraction of the budget:
    while one is computed, the state of the next ones is read and that of the last ones written.
    The wrapped class itself does the computing, plain, foreach or fused as chosen.

    It is a `torch.optim.Optimizer`: learning-rate schedulers, `torch.amp.GradScaler`, hooks,
    ``add_param_group``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` work as with the
    wrapped one. Parameters may be in memory, sharded by FSDP2 (each process spills its shards), or
    belong to a model whose parameters and gradients visit memory only (see `Residency`).

    Parameters
    ----------
    cls : type
        The optimizer's class, such as `torch.optim.AdamW`. Those that treat each parameter on its
        own work, which are all of torch's but LBFGS.
    params : iterable
        Parameters or groups, as the class takes them; all on one device.
    folder : str, path, or sequence of these
        Where the state goes; see `SpillFile`.
    budget : int or str
        Bytes of memory for state, while it is stepped and moved.
    master_dtype : torch.dtype, optional
        Keep, on the drive, a copy of each parameter in this dtype, and update that; parameters are
        rounded copies of it. For bfloat16 parameters: ``torch.float32``.
    min_bytes : int or str
        Smaller state tensors stay in memory.
    in_backward : bool
        Step parameters in the middle of backward, as soon as their gradients are complete; see the
        notes.
    separable : bool
        Says of a class that is not torch's that it updates each parameter from nothing but that
        parameter, its gradient, its own state and its group's settings.
    verify : bool
        Keep a digest of each tensor, and check it whenever one is read.
    backend, capacity
        See `SpillFile`.
    engine : mapping, optional
        Options of the engines, see `open_engine`.
    **defaults
        The class's settings, such as ``lr``.

    Raises
    ------
    UnsupportedError
        The class can't be stepped in parts, or the parameters are on several devices.
    CapacityError
        The budget is too small; says the smallest that works.
    SpillError
        As `SpillFile` and `BufferPool` do; nothing is left behind.

    Notes
    -----
    When a drive fails in a step, the step raises, and every parameter is whole: either its value
    and its state are those from before the step, or both are those after it. A state that could
    not be written stays in memory, and writing is tried again in the next step. `finish_step` does
    the rest of the step, with the gradients of now; `state_dict` works as well.

    With ``in_backward`` a parameter is stepped as soon as backward is through with it: value and
    gradient are in memory still, and its state is read and written behind the rest of backward.
    `step` makes what is left and ends the step; the results are the same, to the last bit. So that
    nothing is used too early:

    - The first step is made after backward, and shows in which order gradients come. Parameters to
      which one backward adds several times (shared ones under reentrant checkpointing) are always
      stepped by `step`, and so are gradients of ``create_graph``.
    - ``parameter.grad`` is a placeholder after backward, whose values can't be looked at, until
      ``zero_grad``. So gradients can't be clipped by their norm, nor unscaled by a gradient scaler,
      nor read; another backward before ``zero_grad`` raises, as do closures.
    - Where gradients of several backwards are added up, all but the last belong in `accumulating`.
    - Settings such as ``lr`` are those of the time of backward; `step` raises if they changed.
    - Processes that average gradients after backward, as DDP does, are refused.
    - If backward raises, by whatever error, the parameters that were stepped keep that step, and
      each is whole as above. `step` makes those whose gradients are complete, ``zero_grad`` drops
      these; for the numbers of a training without error, go back to a checkpoint.
    - Code that keeps a parameter's value for backward past autograd gets the new one.

    A gradient scaler and `torch.nn.utils.clip_grad_norm_` need gradients in memory, and raise where
    they are spilled; for clipping there is `tensorspill.optimizer.clip_grad_norm_`.

    ``state`` is a view of the state in memory and on the drive: what it returns are copies.

    Examples
    --------
    >>> optimizer = SpilledOptimizer(  # doctest: +SKIP
    ...     torch.optim.AdamW, model.parameters(), folder="/mnt/nvme", budget="1GiB", lr=3e-4
    ... )
    """

    #: Parameters may be on the drive when it is stepped (see `residency.guards`).
    brings_parameters = True

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        params: ParamsT,
        *,
        folder: Folder | Sequence[Folder],
        budget: int | str = "1GiB",
        master_dtype: torch.dtype | None = None,
        min_bytes: int | str = "64KiB",
        in_backward: bool = False,
        separable: bool = False,
        verify: bool = False,
        backend: str = "auto",
        capacity: int | str | None = None,
        engine: Mapping[str, Any] | None = None,
        **defaults: Any,
    ) -> None:
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._states: StateTensors | None = None
        self.masters = Masters(master_dtype)
        self._in_backward: InBackward | None = None
        self._closed = False
        groups = _listed(params)
        self._wrapped = Wrapped(cls, groups, defaults, separable)
        self._planner = Planner(
            self._wrapped, self.masters, parse_bytes(budget), parse_bytes(min_bytes)
        )
        super().__init__(groups, self._wrapped.optimizer.defaults)
        # With `in_backward` so that a scaler shows, and can be refused.
        if in_backward or getattr(self._wrapped.optimizer, "_step_supports_amp_scaling", False):
            self._step_supports_amp_scaling = True
        swapper = self._open_swapper(
            folder,
            self._planner.pool_bytes(self.param_groups),
            min_bytes=min_bytes,
            verify=verify,
            device=common_device(self.param_groups),
            backend=backend,
            capacity=capacity,
            **dict(engine or {}),
        )
        self._states = StateTensors(swapper)
        self._stepper = Stepper(self._wrapped, self.masters, self._states)
        if in_backward:
            self._in_backward = InBackward(self._planner, self._groups, self._step_early)
        self._steps = Steps(
            self._planner, self._stepper, self._states, self._groups, self._in_backward
        )
        self.state: Any = States(self)
        try:
            self._make_eager_state(range(len(self.param_groups)))
            if self._in_backward is not None:
                self._in_backward.watch()
        except BaseException:
            self.close()
            raise

    # -- stepping ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and the gradients once more; its value is returned.

        Raises
        ------
        UnsupportedError
            With ``in_backward``: there is a closure or a gradient scaler, or settings changed since
            backward.
        CapacityError
            Parameters of an offloaded model don't fit in its memory, or the file is full.
        BrokenError, CorruptError
            A drive failed; see the class for what state holds.
        ClosedError
        """
        if self._in_backward is not None and (closure is not None or from_scaler(self)):
            raise UnsupportedError(
                "A step that begins in backward can't evaluate a closure, nor unscale gradients",
                remedy="Use a SpilledOptimizer without in_backward; bfloat16 needs no scaler",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_open()
        with self.lock:
            self._steps.begin()
            self.finish_step()
        return loss

    def finish_step(self) -> None:
        """Do what a step that failed has left out; nothing if none has.

        The parameters that were updated are not updated again. Raises what `step` does.
        """
        self._check_open()
        with self.lock:
            self._steps.finish(from_scaler(self))

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context in which backward steps nothing, and adds to gradients only.

        For all backwards but the last before a step, with ``in_backward``; no difference without.
        """
        return nullcontext() if self._in_backward is None else self._in_backward.accumulating()

    def _step_early(self, portion: Portion, done: Callable[[], None]) -> None:
        """Step a portion in the middle of backward."""
        self._check_open()
        with self.lock:
            self._steps.step_early(portion, done)

    def _make_eager_state(self, numbers: Iterable[int]) -> None:
        """Make and spill what the class has of parameters before their first step."""
        if not self._wrapped.eager or self.masters.dtype is not None:
            return
        members = [Member(n, p) for n in numbers for p in self.param_groups[n]["params"]]
        for portion in self._planner.portions(self.param_groups, members):
            self._stepper.make_eager_state(self.param_groups, portion)

    # -- state ---------------------------------------------------------------------------------

    def state_of(self, parameter: torch.Tensor) -> ParameterState:
        """Return a parameter's state: a dictionary that reads a tensor when it is asked for it.

        What it returns are copies. With `ParameterState.source`, a tensor can be had piece by piece
        instead, as `tensorspill.checkpoint` does.
        """
        return ParameterState(self, parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the form of the wrapped optimizer's.

        Nothing is read before it is asked for: the state of each parameter is a `ParameterState`.
        The wrapped optimizer's ``load_state_dict`` takes it, and so does `torch.save`, which reads
        all of it to memory. With master weights, each is one more entry, ``"master"``.
        """
        self._check_open()
        return super().state_dict()

    def streaming_state_dict(self) -> dict[str, Any]:
        """Return the state with a `StateSource` in place of each tensor that is on the drive.

        `tensorspill.checkpoint` asks for it, and reads sources piece by piece.
        """
        found = self.state_dict()
        state = {
            key: value.sources() if isinstance(value, ParameterState) else value
            for key, value in found["state"].items()
        }
        return {**found, "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this or of the wrapped optimizer returned.

        Goes parameter by parameter, so a `state_dict` whose values come when they are asked for
        never has to fit in memory.

        Raises
        ------
        ValueError
            It is for other groups of parameters.
        CapacityError, BrokenError
            There is no room for it beside the state of now, or a drive failed. The state is what it
            was, unless the error came when it was replaced already.
        ClosedError
        """
        self._check_open()
        with self.lock, keep_undigested(self):
            super().load_state_dict(dict(state_dict))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded state; called by torch's ``load_state_dict``."""
        groups: list[Group] = state["param_groups"]
        new: dict[torch.Tensor, Undigested] = state["state"]
        tensors = self.state_tensors
        tensors.memory.flush()
        masters, values = loaded(self, new, groups)
        replaced = tensors.spilled(self._stepper.values(self._parameters()))
        with HeldInterrupts():
            self._steps.unfinished = []
            self.masters.clear()
            for parameter, master in masters.items():
                self.masters.set(parameter, master)
            updated = [{**group, "params": self._updated(group)} for group in groups]
            self._wrapped.adopt_settings(values, updated)
            self.param_groups = [
                {**new, "params": group["params"]}
                for new, group in zip(updated, groups, strict=True)
            ]
            self._planner.forget(self._parameters())
        tensors.forget(replaced)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as the wrapped optimizer would.

        Raises
        ------
        CapacityError
            The budget is too small for the state of one of them. Nothing changed.
        """
        super().add_param_group(param_group)
        if self._states is None:
            return
        try:
            common_device(self.param_groups)
            number = len(self.param_groups) - 1
            members = [Member(number, p) for p in self.param_groups[-1]["params"]]
            largest = max((self._planner.cost(self.param_groups, m) for m in members), default=0)
            room = self._states.swapper.budget
            self._planner.check(largest, min(room, self._planner.budget - room))
            self._make_eager_state([number])
            if self._in_backward is not None:
                self._in_backward.watch()
        except BaseException:
            self._planner.forget(self.param_groups.pop()["params"])
            raise

    # -- the rest ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all state is on the drive, and let go its memory.

        Raises
        ------
        BrokenError, CapacityError
            A write failed; that state stays in memory, and a later call tries again.
        """
        self._check_open()
        with self.lock:
            self.state_tensors.memory.flush()

    def statistics(self) -> OptimizerStatistics:
        """Return what was done so far; works after `close` as well."""
        tensors = self.state_tensors
        with self.lock:
            spilled = list(tensors)
            small = self._stepper.values(self._parameters())
            store = tensors.store
            return OptimizerStatistics(
                steps=self._steps.finished,
                portions=self._steps.portions,
                tensors=len(spilled),
                state_bytes=sum(state.entry.parameter.nbytes for state in spilled),
                memory_bytes=sum(
                    v.nbytes
                    for v in small
                    if isinstance(v, torch.Tensor) and tensors.find(v) is None
                ),
                resident_bytes=store.resident_bytes,
                peak_bytes=store.peak_bytes,
                budget_bytes=self._planner.budget,
                bytes_in=store.counts["bytes_in"],
                bytes_out=store.counts["bytes_out"],
                transfer_seconds=store.clock.busy,
                stalled_seconds=store.clock.stalled,
                swapper=tensors.swapper.statistics(),
            )

    def close(self) -> None:
        """Wait for transfers, give up the memory and remove the spill file, and all state with it.

        A second time does no harm; a forked child does nothing. Parameters stay what they are.
        """
        if os.getpid() != self._pid:
            return
        with self.lock:
            self._closed = True
            if self._in_backward is not None:
                self._in_backward.close()
            if self._states is not None:
                self._states.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled: the copy would need a spill file of its own."""
        raise UnsupportedError(
            "A spilled optimizer can't be copied or pickled", remedy="Use its state_dict()"
        )

    # -- details -------------------------------------------------------------------------------

    def _open_swapper(self, folder: Any, pool_bytes: int, **options: Any) -> ParameterSwapper:
        return ParameterSwapper(folder, None, pool_bytes, **options)

    @property
    def state_tensors(self) -> StateTensors:
        """Where the state is. Internal."""
        if self._states is None:
            raise ClosedError("The spilled optimizer was not completely made")
        return self._states

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The spilled optimizer is closed")
        if os.getpid() != self._pid:  # where nobody may ever let go of the lock
            raise ClosedError(
                "The spilled optimizer belongs to the parent process",
                remedy="Make one in this process",
            )

    def _groups(self) -> list[Group]:
        return self.param_groups

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def _updated(self, group: Group) -> list[torch.Tensor]:
        """Return what the wrapped optimizer knows of a group: masters, where there are such."""
        masters = (self.masters.of(parameter) for parameter in group["params"])
        return [master for master in masters if master is not None]

    def raw_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state as it is kept; what is away is a placeholder. Internal."""
        return self._stepper.raw_state(parameter)


def _listed(params: Any) -> list[Group]:
    """Return parameters or groups as groups, whose lists can be gone through several times."""
    if isinstance(params, torch.Tensor):
        raise UnsupportedError("Parameters come in a list or as groups, not as one tensor")
    listed = list(params)
    if listed and not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    groups: list[Group] = []
    for group in listed:
        members: Iterable[Any] = group["params"]
        single = isinstance(members, torch.Tensor | set)
        groups.append({**group, "params": members if single else list(members)})
    return groups
