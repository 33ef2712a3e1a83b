"""Blocks of a model whose parameters live in the spill file and visit memory when they are used."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from tensorspill import timeline
from tensorspill.errors import CapacityError, ClosedError, UnsupportedError
from tensorspill.pool.sizes import parse_bytes, round_down
from tensorspill.residency import guards, registry
from tensorspill.residency.entry import BUFFER_ALIGNMENT, Spilled, is_plain
from tensorspill.residency.gradients import SpilledGradients
from tensorspill.residency.hooks import BlockHooks
from tensorspill.residency.memory import ResidentMemory
from tensorspill.residency.schedule import Phase, Schedule, Step
from tensorspill.residency.statistics import ResidencyStatistics, footprint, spillable
from tensorspill.residency.store import ParameterStore
from tensorspill.residency.visits import Block
from tensorspill.swap.swapper import ParameterSwapper

__all__ = ["Residency"]


class Residency:
    """Keeps the parameters of a model's blocks in the spill file, and brings them when needed.

    A block's parameters are fetched before its forward and before its backward, and let go after.
    While one block computes, the next ones are fetched ahead, in the order in which blocks were
    used the last time, as far as the swapper's budget has room. In between, ``parameter.data`` is a
    placeholder of the same shape (NaN, for floating-point types). Gradients stay in memory.

    Training gives the same numbers, to the last bit, as with all parameters in memory; also with
    parameters shared between blocks, blocks called several times, frozen parameters, `no_grad`,
    and activation checkpointing around or inside of blocks.

    The order of calls::

        residency = Residency(model, model.blocks, swapper)
        for batch in data:
            loss(model, batch).backward()
            for block in model.blocks:
                with residency.updating(block):
                    optimizers[block].step()
        residency.close()

    Parameters
    ----------
    model : torch.nn.Module
        The whole model. What is not in a block, or is shared with something outside of blocks, is
        smaller than the swapper's threshold, has another dtype, or is not contiguous, stays in
        memory.
    blocks : iterable of torch.nn.Module
        Modules of `model`, in the order of forward. They must be *called* (`module(x)`): what uses
        their parameters in other ways meets placeholders. More can be added by `add`.
    swapper : ParameterSwapper
        Its budget limits what is in memory. Not closed by this object, and not to be used by others
        for the same parameters meanwhile.
    prefetch : int, optional
        How many blocks to fetch ahead; as many as there is room for if not given. If it is given,
        there must be room for one at least.

    Raises
    ------
    CapacityError
        The budget is too small for the largest block, or for fetching ahead if `prefetch` asks for
        it; the error says the smallest that works. The model is unchanged.
    NoSpaceError, BrokenError
        The drive has no room, or failed. The model is unchanged.
    UnsupportedError
        A block is not a module of `model`, or is given twice.

    Notes
    -----
    ``state_dict`` returns copies in ordinary memory, where they must fit; ``load_state_dict``
    writes. Both bring one module after the other. Deep copies and pickles are refused, and so is
    the step of an optimizer on parameters that are on the drive. After an error in the middle of a
    step nothing stays pinned, and the next step can be taken.

    A change in place that autograd counts is kept wherever it is made while the parameter is in
    memory, and so is other data of the same shape that it is given (``parameter.data = …``); such
    data given while it is on the drive raises UnsupportedError at the next use, and the drive's
    value stays. Changes through ``parameter.data`` go unnoticed outside of `updating`.

    Views of a parameter that code keeps outside of autograd's saved tensors (in an attribute, say)
    are not valid after the block's forward; what a block returns in a container that
    `torch.utils._pytree` doesn't know isn't looked into.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        swapper: ParameterSwapper,
        *,
        prefetch: int | None = None,
    ) -> None:
        self._model = model
        self._swapper = swapper
        self._prefetch = prefetch
        self._blocks: list[Block] = []
        self._entries: dict[torch.Tensor, Spilled] = {}
        self._groups: dict[tuple[Spilled, ...], Block] = {}
        #: Those that are spilled too; None if gradients stay in memory.
        self.gradients: SpilledGradients | None = None
        self._store = ParameterStore(swapper)
        self._memory = ResidentMemory(self._store, swapper.budget, prefetch)
        self._schedule = Schedule(self._memory, self._blocks)
        self._lock = threading.RLock()
        self._hooks = BlockHooks(self._schedule, self._entries.get, self._lock)
        self._kept: dict[Spilled, None] = {}
        self._closed = self._restored = False
        guards.watch_optimizers()
        blocks = list(blocks)
        self._check_blocks(blocks)
        self._check_budget(blocks)
        self._hooks.watch_model(model)
        try:
            for block in blocks:
                self.add(block)
        except BaseException:
            self.close(restore=True)
            raise
        self._store.peak_bytes = self._store.resident_bytes

    # -- what users call -----------------------------------------------------------------------

    def spill_gradients(self, budget: int | str) -> SpilledGradients:
        """Spill the gradients of spilled parameters too, from now on; see `SpilledGradients`.

        Parameters
        ----------
        budget : int or str
            Bytes of memory for them, beside the swapper's budget; two of the largest do.

        Raises
        ------
        CapacityError
            The budget is smaller than the largest gradient.
        UnsupportedError
            They are spilled already.
        BrokenError
            There is no such memory.
        """
        with self._lock:
            self._check_open()
            if self.gradients is not None:
                raise UnsupportedError("The gradients are spilled already")
            nbytes = round_down(parse_bytes(budget), BUFFER_ALIGNMENT)
            largest = max((entry.nbytes for entry in self._entries.values()), default=0)
            if nbytes < largest:
                raise CapacityError(
                    "The budget is too small for the largest gradient",
                    asked=largest,
                    free=nbytes,
                    largest=nbytes,
                    remedy=f"The smallest that works is {largest} bytes",
                )
            self.gradients = SpilledGradients(
                self._swapper.file, nbytes, self._store.clock, self._lock
            )
            for block in self._blocks:
                self.gradients.add([entry.parameter for entry in block.entries])
            return self.gradients

    def add(self, block: nn.Module) -> None:
        """Spill one more block of the model: write its parameters, and let go their memory.

        A model that is built block by block, each added before the next is made, never has to fit
        in memory as a whole.

        Raises
        ------
        CapacityError
            The budget is smaller than the block, or the spill file is full; nothing changed.
        UnsupportedError
            `block` is not a module of the model, or was added before; or a parameter that is
            spilled already is used outside of blocks by now.
        """
        with self._lock:
            self._check_open()
            self._check_blocks([block])
            self._check_budget([block])
            spilled = self._spillable([block])
            fresh = [p for p in block.parameters() if p in spilled and p not in self._entries]
            names = {p: name for name, p in self._model.named_parameters()}
            entries: dict[torch.Tensor, Spilled] = {p: Spilled(p, names[p]) for p in fresh}
            self._store.keep_outside(self._outside_bytes())
            self._store.adopt(list(entries.values()))
            self._entries.update(entries)
            registry.enter(entries, self)
            for parameter in entries:
                guards.guard(parameter)
            self._store.keep_outside(self._outside_bytes())
            name = next((name for name, m in self._model.named_modules() if m is block), "")
            self._blocks.append(Block(len(self._blocks), block, name=name))
            self._hooks.watch_block(self._blocks[-1], block)
            for known in self._blocks:  # what earlier blocks share with this one is spilled now
                known.entries = self._spilled(known.module)
                self._watch_states(known)
            if self.gradients is not None:
                self.gradients.add(list(entries))

    @contextmanager
    def updating(self, *modules: nn.Module) -> Iterator[None]:
        """Return a context in which the parameters of `modules` are in memory to be changed.

        They begin to be written when it ends, also by an exception; a write that fails is raised by
        a later call (or `flush`), and its parameters stay in memory until they could be written.

        Parameters
        ----------
        *modules : torch.nn.Module
            Blocks, or any other modules of the model. What is not spilled is not touched.

        Raises
        ------
        CapacityError
            They don't fit in memory together.
        SpillError
            A read failed, or an earlier write.
        """
        with self._using(modules, Phase.UPDATE):
            yield

    @contextmanager
    def updating_parameters(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Return a context in which these parameters are in memory to be changed.

        As `updating`, for an optimizer that goes by groups of its own. Groups that follow one
        another each step are fetched ahead from the second time on; the first time, `fetch_ahead`
        says what is next.

        Parameters
        ----------
        parameters : iterable of torch.nn.Parameter
            What is not spilled is not touched.

        Raises
        ------
        CapacityError
            They don't fit in memory together; see `memory_for`.
        SpillError
            A read failed, or an earlier write.
        """
        entries = self._known(parameters)
        group = self._groups.setdefault(tuple(entries), Block(-1, None, entries))
        with self._holding(entries, (Phase.UPDATE, group), changing=True):
            yield

    def fetch_ahead(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin to read these parameters if there is room: they will be needed next.

        Never waits for a transfer. Several calls announce several groups, in that order.
        """
        with self._lock:
            self._check_open()
            self._schedule.fetch_ahead(self._known(parameters))

    def memory_for(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return how many bytes of the budget these parameters take while they are in memory."""
        return sum(entry.nbytes for entry in self._known(parameters))

    @contextmanager
    def resident(self, *modules: nn.Module) -> Iterator[None]:
        """Return a context in which the parameters of `modules` are in memory to be read.

        Raises what `updating` raises.
        """
        with self._using(modules, Phase.READ):
            yield

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is in memory for somebody who called for it."""
        entry = self._entries.get(parameter)
        return entry is None or entry.pins > 0

    @property
    def entered(self) -> bool:
        """Whether this thread is in the middle of something that a residency does."""
        lock: Any = self._lock
        return bool(lock._is_owned())

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a spilled parameter in the model; that of others is "?"."""
        entry = self._entries.get(parameter)
        return "?" if entry is None else entry.name

    def blocks(self) -> list[list[torch.Tensor]]:
        """Return the spilled parameters of each block, shared ones in the first that has them."""
        seen: set[Spilled] = set()
        found: list[list[torch.Tensor]] = []
        for block in self._blocks:
            fresh = [entry for entry in block.entries if entry not in seen]
            seen.update(fresh)
            found.append([entry.parameter for entry in fresh])
        return found

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a parameter's value in ordinary memory, or of any other tensor.

        Raises
        ------
        CapacityError, SpillError
            As `resident`.
        """
        with self._holding(self._known([tensor]), None, changing=False):
            return tensor.detach().clone()

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """Bring parameters to memory and leave them there until `close`.

        For those that are used outside of their block's call. They take a part of the budget.

        Raises
        ------
        CapacityError
            There is no room for them beside the largest block; nothing changed.
        SpillError
            A read failed.
        """
        with self._lock:
            self._check_open()
            entries = [e for e in self._known(parameters) if e not in self._kept]
            self._check_kept(entries)
            self._schedule.acquire(entries)
            self._kept.update(dict.fromkeys(entries))

    def flush(self) -> None:
        """Wait until all that was changed is on the drive, and let go what is not in use.

        Raises
        ------
        SpillError
            A write failed; its parameters stay in memory, and a later call tries again.
        """
        with self._lock:
            self._hooks.settle()
            if self.gradients is not None:
                self.gradients.flush()
            self._memory.flush()

    def statistics(self) -> ResidencyStatistics:
        """Return what was done so far; works after `close` as well."""
        with self._lock:
            self._hooks.settle()
            store = self._store
            gradients_in, gradients_out = self._moved_gradients()
            return ResidencyStatistics(
                blocks=len(self._blocks),
                parameters=len(self._entries),
                spilled_bytes=sum(parameter.nbytes for parameter in self._entries),
                outside_bytes=store.outside_bytes,
                resident_bytes=store.resident_bytes,
                peak_bytes=store.peak_bytes,
                budget_bytes=store.outside_bytes + self._memory.capacity,
                pinned_bytes=self._memory.pinned_bytes(),
                transfer_seconds=store.clock.busy,
                stalled_seconds=store.clock.stalled,
                gradients_in=gradients_in,
                gradients_out=gradients_out,
                **store.counts,
                **self._memory.counts,
            )

    def close(self, *, restore: bool = False) -> None:
        """Write what changed, remove the hooks; a second time does no harm.

        Parameters
        ----------
        restore : bool
            Bring all parameters back to ordinary memory, where they must fit. Otherwise they stay
            placeholders, and their values in the spill file as long as the swapper is open.

        Raises
        ------
        SpillError
            A write failed, or a read of `restore`; the hooks are removed nevertheless.
        """
        with self._lock:
            self._closed = True
            self._hooks.remove()
            self._schedule.unpin(self._kept, changed=True)
            self._kept.clear()
            try:
                self.flush()
            finally:
                if self.gradients is not None:
                    self.gradients.close(restore=restore)
                    self.gradients = None
            if restore and not self._restored:
                self._store.give_up(self._entries.values())
                registry.leave(self._entries)
                for parameter in self._entries:
                    guards.unguard(parameter)
                self._restored = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- details -------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The residency is closed")

    def _check_blocks(self, blocks: list[nn.Module]) -> None:
        modules = set(self._model.modules())
        known: set[nn.Module | None] = {block.module for block in self._blocks}
        if len(known | set(blocks)) < len(known) + len(blocks):
            raise UnsupportedError("A block was given twice, or added before")
        if not modules.issuperset(blocks):
            raise UnsupportedError("A block must be a module of the model")

    def _check_budget(self, blocks: list[nn.Module]) -> None:
        known = [block.module for block in self._blocks if block.module is not None]
        needs = footprint(self._model, [*known, *blocks], self._can_spill)
        smallest = needs.prefetch_budget if self._prefetch else needs.smallest_budget
        budget = needs.outside_bytes + self._swapper.budget
        if budget < smallest:
            ahead = " and the one fetched ahead" if self._prefetch else ""
            raise CapacityError(
                f"The budget is too small for the largest block{ahead}",
                asked=smallest - needs.outside_bytes,
                free=self._swapper.budget,
                largest=self._swapper.budget,
                remedy=f"The smallest that works is {smallest} bytes, of which "
                f"{needs.outside_bytes} are for parameters that stay in memory",
            )

    def _check_kept(self, entries: list[Spilled]) -> None:
        kept = {*self._kept, *entries}
        beside = max(
            (sum(e.nbytes for e in block.entries if e not in kept) for block in self._blocks),
            default=0,
        )
        needed = sum(entry.nbytes for entry in kept) + beside
        if needed > self._swapper.budget:
            raise CapacityError(
                f"The budget has no room for {', '.join(e.name for e in entries)}, which must stay "
                "in memory, beside the largest block",
                asked=needed,
                free=self._swapper.budget,
                largest=self._swapper.budget,
                remedy=f"This takes a budget of {self._store.outside_bytes + needed} bytes at "
                "least",
            )

    def _can_spill(self, parameter: nn.Parameter) -> bool:
        if parameter in self._entries:
            return True
        ours = parameter.device == self._swapper.file.device
        ours = ours and parameter.dtype == (self._swapper.dtype or parameter.dtype)
        return ours and is_plain(parameter) and self._swapper.swappable(parameter)

    def _spillable(self, more: list[nn.Module]) -> dict[nn.Parameter, None]:
        blocks = [block.module for block in self._blocks if block.module is not None] + more
        spilled = spillable(self._model, blocks, self._can_spill)
        if any(parameter not in spilled for parameter in self._entries):
            raise UnsupportedError("A spilled parameter is used outside of blocks by now")
        return spilled

    def _spilled(self, module: nn.Module | None) -> list[Spilled]:
        if module is None:
            return []
        return [self._entries[p] for p in module.parameters() if p in self._entries]

    def _watch_states(self, block: Block) -> None:
        for module in () if block.module is None else block.module.modules():
            own = self._known(module.parameters(recurse=False))
            if own:
                self._hooks.watch_state(module, own)

    def _outside_bytes(self) -> int:
        return sum(p.nbytes for p in self._model.parameters() if p not in self._entries)

    def _moved_gradients(self) -> tuple[int, int]:
        return (0, 0) if self.gradients is None else self.gradients.moved()

    def _known(self, parameters: Iterable[torch.Tensor]) -> list[Spilled]:
        return [self._entries[p] for p in dict.fromkeys(parameters) if p in self._entries]

    @contextmanager
    def _using(self, modules: tuple[nn.Module, ...], phase: Phase) -> Iterator[None]:
        entries = list(dict.fromkeys(e for m in modules for e in self._spilled(m)))
        block = next((b for b in self._blocks if modules == (b.module,)), None)
        step = None if block is None else (phase, block)
        with self._holding(entries, step, changing=phase is Phase.UPDATE):
            yield

    @contextmanager
    def _holding(
        self, entries: list[Spilled], step: Step | None, *, changing: bool
    ) -> Iterator[None]:
        with self._lock:
            self._check_open()
            self._hooks.settle()
            self._schedule.acquire(entries, step, changing=changing)
        try:
            with timeline.span("compute", "update" if changing else "read"):
                yield
        finally:
            with self._lock:
                self._schedule.unpin(entries, changed=changing)
                self._schedule.tidy()
