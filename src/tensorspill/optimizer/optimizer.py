"""An optimizer whose state lives on the drive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch.optim.optimizer import ParamsT

from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.errors import ClosedError, SpillError, UnsupportedError
from tensorspill.optimizer.masters import Masters
from tensorspill.optimizer.planning import Planner, common_device
from tensorspill.optimizer.portions import Member, Portion
from tensorspill.optimizer.state_dicts import (
    MASTER,
    ParameterState,
    States,
    Undigested,
    keep_undigested,
    loaded,
)
from tensorspill.optimizer.states import StateTensor, StateTensors
from tensorspill.optimizer.statistics import OptimizerStatistics
from tensorspill.optimizer.visits import fetch_ahead, offloaded, visiting
from tensorspill.optimizer.wrapped import Group, Wrapped, from_scaler, same_choice
from tensorspill.pool.sizes import parse_bytes
from tensorspill.residency.pace import Coming
from tensorspill.spill.file import Folder
from tensorspill.swap.swapper import ParameterSwapper
from tensorspill.timeline import span

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
        self._unfinished: list[Portion] = []
        self._planned: list[Portion] = []
        self._steps = 0
        self._reversed, self._closed = True, False
        groups = _listed(params)
        self._wrapped = Wrapped(cls, groups, defaults, separable)
        self._planner = Planner(
            self._wrapped, self.masters, parse_bytes(budget), parse_bytes(min_bytes)
        )
        super().__init__(groups, self._wrapped.optimizer.defaults)
        if getattr(self._wrapped.optimizer, "_step_supports_amp_scaling", False):
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
        self.state: Any = States(self)
        try:
            self._make_eager_state(range(len(self.param_groups)))
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
        CapacityError
            Parameters of an offloaded model don't fit in its memory, or the file is full.
        BrokenError, CorruptError
            A drive failed; see the class for what state holds.
        ClosedError
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_open()
        with self.lock:
            members = [
                Member(number, parameter)
                for number, group in enumerate(self.param_groups)
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            self._planned = self._planner.portions(self.param_groups, members)
            # Back the way the last one came: what is in memory since then needs no reading.
            self._reversed = not self._reversed and not offloaded(self._parameters())
            self._unfinished = self._planned[::-1] if self._reversed else list(self._planned)
            self.finish_step()
        return loss

    def finish_step(self) -> None:
        """Do what a step that failed has left out; nothing if none has.

        The parameters that were updated are not updated again. Raises what `step` does.
        """
        self._check_open()
        with self.lock:
            if not self._unfinished:
                return
            scaler = from_scaler(self)
            try:
                while self._unfinished:
                    self._step_portion(self._unfinished[0], scaler)
            except SpillError:
                self.state_tensors.settle()
                raise

    def _step_portion(self, portion: Portion, scaler: Mapping[str, Any]) -> None:
        tensors, parameters = self.state_tensors, portion.parameters
        with visiting(parameters):
            states = self._spilled(portion)
            following = self._unfinished[1:]
            tensors.acquire(states, self._upcoming(following))
            if following:
                fetch_ahead(following[0].parameters)
            done = False
            try:
                with HeldInterrupts():
                    with span("compute", "optimizer"):
                        self._compute(portion, scaler)
                    del self._unfinished[0]
                    self._steps += not self._unfinished
                    done = True
            finally:
                tensors.unpin(states, changed=done)
        self._spill_new(portion)
        tensors.memory.tidy(self._upcoming(self._unfinished))

    @torch.no_grad()
    def _compute(self, portion: Portion, scaler: Mapping[str, Any]) -> None:
        groups = self._groups_of(portion, self.masters.begin)
        try:
            self._wrapped.step(groups, scaler)
            self.masters.round(portion.parameters)
        finally:
            self.masters.end(portion.parameters)

    def _make_eager_state(self, numbers: Iterable[int]) -> None:
        """Make and spill what the class has of parameters before their first step."""
        if not self._wrapped.eager or self.masters.dtype is not None:
            return
        members = [Member(n, p) for n in numbers for p in self.param_groups[n]["params"]]
        for portion in self._planner.portions(self.param_groups, members):
            with visiting(portion.parameters):
                self._wrapped.make_state(self._groups_of(portion, lambda mine: mine))
            self._spill_new(portion)

    def _spill_new(self, portion: Portion) -> None:
        """Write what state has come up, or could not be written before."""
        self.state_tensors.adopt([v for p in portion.parameters for v in self._values(p)])

    def _upcoming(self, portions: Sequence[Portion]) -> Iterator[Coming]:
        """Yield what will be needed after the portion at hand, in this step and in the next."""
        for portion in portions:
            yield self._coming(portion)
        # Not while there is less memory than this step still needs, had it any state yet.
        if sum(portion.nbytes for portion in portions) < self.state_tensors.swapper.budget:
            forwards = self._reversed or offloaded(self._parameters())
            for portion in self._planned if forwards else self._planned[::-1]:
                yield self._coming(portion)

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
        replaced = tensors.spilled(v for p in self._parameters() for v in self._values(p))
        with HeldInterrupts():
            self._unfinished = []
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
            small = [v for p in self._parameters() for v in self._values(p)]
            store = tensors.store
            return OptimizerStatistics(
                steps=self._steps,
                portions=len(self._planned),
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

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def _updated(self, group: Group) -> list[torch.Tensor]:
        """Return what the wrapped optimizer knows of a group: masters, where there are such."""
        masters = (self.masters.of(parameter) for parameter in group["params"])
        return [master for master in masters if master is not None]

    def _values(self, parameter: torch.Tensor) -> list[Any]:
        """Return all there is of a parameter's state."""
        return list(self.raw_state(parameter).values())

    def raw_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state as it is kept; what is away is a placeholder. Internal."""
        updated = self.masters.of(parameter)
        if updated is None:
            return {}
        found = dict(self._wrapped.state.get(updated, {}))
        return found if updated is parameter else {**found, MASTER: updated}

    def _groups_of(
        self, portion: Portion, updated: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    ) -> list[Group]:
        """Return the groups that a portion has a part in, with that part only."""
        groups = []
        for number, group in enumerate(self.param_groups):
            mine = [m.parameter for m in portion.members if m.group == number]
            if mine:
                settings = {k: v for k, v in group.items() if k != "param_names"}
                settings = same_choice(settings, group["params"])
                groups.append({**settings, "params": updated(mine)})
        return groups

    def _coming(self, portion: Portion) -> Coming:
        return Coming([state.entry for state in self._spilled(portion)], 0.0)

    def _spilled(self, portion: Portion) -> list[StateTensor]:
        return self.state_tensors.spilled(v for p in portion.parameters for v in self._values(p))


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
