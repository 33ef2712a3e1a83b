"""Gradients that live in the spill file between backward and the optimizer's step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd import Variable

from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.residency.accumulation import Accumulation
from tensorspill.residency.clock import TransferClock
from tensorspill.residency.guards import Uncopyable
from tensorspill.residency.packs import Pack, PackStore, lay_out
from tensorspill.residency.spent import SpentGradient
from tensorspill.residency.trim import trim
from tensorspill.spill.file import SpillFile

__all__ = ["SpilledGradients", "pack_bytes"]


def pack_bytes(budget: int) -> int:
    """Return the size that packs should have, so that several are written while one is filled."""
    return min(budget // 4, 16 << 20)


class SpilledGradients(Uncopyable):
    """The gradients of spilled parameters, on the drive in packed buffers.

    As soon as a parameter's gradient is complete it is copied to its place in a pack, and its own
    memory is given up. A pack is written when all its gradients are there, or backward ends.

    While a gradient is on the drive, ``parameter.grad`` is a placeholder (NaN, without memory), so
    that whoever uses it by mistake notices. Setting ``parameter.grad`` to None, as ``zero_grad``
    does, forgets the gradient; the next backward adds to it otherwise, to the same bits as in
    memory. Sparse gradients, and those of ``create_graph``, stay in memory.

    Parameters
    ----------
    file : SpillFile
        Where they go, under names of their own. Not closed by this object.
    budget : int
        Bytes of memory for them: the largest pack must fit.
    clock : TransferClock
        Told of the transfers.
    lock : threading.RLock
        Held while anything changes.

    Raises
    ------
    BrokenError
        There is no such memory.
    """

    def __init__(
        self, file: SpillFile, budget: int, clock: TransferClock, lock: threading.RLock
    ) -> None:
        self.pool = BufferPool(budget, file.device)
        self._store = PackStore(file, self.pool, clock)
        #: Free memory that the C library may keep of gradients that were copied.
        self._spare = self.pool.capacity // 4
        self._lock = lock
        self._packs: dict[torch.Tensor, Pack] = {}
        self._placeholders: dict[torch.Tensor, torch.Tensor] = {}
        self._expected: set[torch.Tensor] = set()
        self._filled: dict[Pack, set[torch.Tensor]] = {}
        self._takers: dict[torch.Tensor, Callable[[torch.Tensor], bool]] = {}
        self._passes: set[int] = set()
        self._accumulation = Accumulation(self._before, self._accumulated)
        self._numbers = 0

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Spill the gradients of these parameters from now on, those that were not before."""
        fresh = [p for p in parameters if p not in self._packs and p.requires_grad]
        # Backward comes to them in the opposite order.
        for group in lay_out(fresh[::-1], pack_bytes(self.pool.capacity)):
            self._numbers += 1
            pack = Pack(f"gradients {self._numbers}", group)
            for parameter in group:
                self._packs[parameter] = pack
                self._placeholders[parameter] = _nothing_like(parameter)
                self._accumulation.watch(parameter)

    def hand_over(
        self, parameters: Iterable[torch.Tensor], taken: Callable[[torch.Tensor], bool]
    ) -> None:
        """Leave gradients in memory, when they are complete, to one who takes them at once.

        Parameters
        ----------
        parameters : iterable of torch.Tensor
            Those whose gradients are not spilled are left alone.
        taken : callable
            Says in the middle of backward whether a parameter's gradient will be taken. Where an
            earlier backward has spilled a part of it, the sum is to be had by `bringing`.
        """
        with self._lock:
            self._takers.update((p, taken) for p in parameters if p in self._packs)

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient of this parameter is on the drive, or on its way there.

        That counts in the middle of backward as well, while more is about to be added to it.
        """
        pack = self._packs.get(parameter)
        if pack is None or parameter not in pack.present:
            return False
        return self._is_away(parameter) or parameter in self._expected

    def memory_for(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return how many bytes of the budget it takes to bring these parameters' gradients."""
        return sum(pack.nbytes for pack in self._packs_of(parameters))

    @contextmanager
    def bringing(
        self, parameters: Iterable[torch.Tensor], *, changing: bool = False
    ) -> Iterator[None]:
        """Return a context in which ``parameter.grad`` of each is in memory.

        At its end they are placeholders again, and those that were set to None, or to a
        `SpentGradient`, are forgotten. Gradients that are not spilled are left alone. May be nested
        in `Residency.updating_parameters`.

        Parameters
        ----------
        parameters : iterable of torch.nn.Parameter
            Of which those count that have a spilled gradient.
        changing : bool
            Write them back at the end, as after clipping. Other changes are lost.

        Raises
        ------
        CapacityError
            They don't fit in the budget for gradients together; see `memory_for`.
        SpillError
            A read failed, or an earlier write. Nothing changed.
        """
        with self._lock:
            away = [p for p in dict.fromkeys(parameters) if self._forget_cleared(p)]
            packs = self._packs_of(away)
            self._hold(packs, changing)
            for parameter in away:
                parameter.grad = self._packs[parameter].view(parameter)
        try:
            yield
        finally:
            with self._lock:
                for parameter in away:
                    self._put_away(parameter, changing)
                self._let_go(packs)

    def fetch_ahead(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin to read these gradients if there is room; never waits."""
        with self._lock:
            for pack in self._packs_of(p for p in parameters if self.has(p)):
                self._store.ahead(pack)

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Set these gradients to None, without reading them."""
        with self._lock:
            for parameter in parameters:
                if self.has(parameter):
                    self._forget(parameter)
                    parameter.grad = None

    def flush(self) -> None:
        """Write what changed, wait for it, and let go what is not in use.

        Raises
        ------
        SpillError
            A write failed; a later call tries again.
        """
        with self._lock:
            held = [pack for pack in self._store.held if not pack.pins]
            for pack in held:
                if pack.dirty:
                    self._store.write(pack)
            for pack in held:
                self._store.await_write(pack)
                self._store.drop(pack)

    def moved(self) -> tuple[int, int]:
        """Return the bytes of gradients read and written so far."""
        return self._store.counts["bytes_in"], self._store.counts["bytes_out"]

    def close(self, *, restore: bool = False) -> None:
        """End it: gradients become None, or are brought to ordinary memory if `restore`.

        Raises
        ------
        SpillError
            A read of `restore` failed; the rest is None.
        """
        with self._lock:
            try:
                for parameter in self._packs if restore else ():
                    with self.bringing([parameter]):
                        kept = None if parameter.grad is None else parameter.grad.clone()
                    if self.has(parameter):
                        self._forget(parameter)
                        parameter.grad = kept
            finally:
                self.forget(self._packs)
                self._accumulation.remove()
                for pack in list(self._store.held):
                    self._store.drop(pack)
                self.pool.close()

    # -- backward --------------------------------------------------------------------------------

    def _before(self, parameter: torch.Tensor) -> None:
        """Take the placeholder away, to which autograd would add."""
        with self._lock:
            if self._forget_cleared(parameter):
                parameter.grad = None
                self._expected.add(parameter)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Add a gradient that is complete to its pack, and give up its memory."""
        with self._lock:
            gradient = parameter.grad
            adding = parameter in self._expected
            self._expected.discard(parameter)
            taken = _is_taken(self._takers.get(parameter), parameter)
            if gradient is None or isinstance(gradient, SpentGradient):
                return
            pack = self._packs[parameter]
            stays = gradient.requires_grad or gradient.layout is not torch.strided
            if (stays or taken) and not adding:
                return
            self._watch_end()
            self._hold_to_change(pack)
            try:
                view = pack.view(parameter)
                if stays:
                    parameter.grad = view.clone() + gradient
                    pack.present.discard(parameter)
                    return
                with torch.no_grad():
                    # In memory it is the sum of the old one and the new one, too.
                    _ = view.add_(gradient) if adding else view.copy_(gradient)
                self._filled_one(pack, parameter)
            finally:
                pack.pins -= 1
            if pack not in self._filled:
                del gradient
                if not taken:
                    self._store.write(pack)
                trim(self._spare)

    def _filled_one(self, pack: Pack, parameter: torch.Tensor) -> None:
        pack.present.add(parameter)
        pack.dirty = True
        parameter.grad = self._placeholders[parameter]
        filled = self._filled.setdefault(pack, set())
        filled.add(parameter)
        if len(filled) == len(pack.offsets):
            del self._filled[pack]

    def _watch_end(self) -> None:
        current = torch._C._current_graph_task_id()
        if current != -1 and current not in self._passes:
            self._passes.add(current)
            Variable._execution_engine.queue_callback(partial(self._ended, current))

    def _ended(self, current: int) -> None:
        """Write packs in which not all gradients were awaited: frozen, or unused this time."""
        with self._lock:
            self._passes.discard(current)
            filled, self._filled = self._filled, {}
            for pack in filled:
                if pack.dirty:
                    self._store.write(pack)

    # -- packs -----------------------------------------------------------------------------------

    def _hold(self, packs: Sequence[Pack], changing: bool) -> None:
        """Pin packs in memory, all or none."""
        pinned: list[Pack] = []
        try:
            for pack in packs:
                pack.pins += 1
                pinned.append(pack)
            for pack in packs:
                self._store.ahead(pack)
            for pack in packs:
                self._store.bring(pack)
                if changing:
                    self._store.await_write(pack)
        except BaseException:
            for pack in pinned:
                pack.pins -= 1
            raise

    def _hold_to_change(self, pack: Pack) -> None:
        """Pin a pack in memory so that it may be changed; a new one is empty."""
        pack.pins += 1
        try:
            if pack.present:
                self._store.bring(pack)
            elif pack.buffer is None:
                self._store.take(pack)
            self._store.settle(pack)  # what could not be written is written once more
        except BaseException:
            pack.pins -= 1
            raise

    def _let_go(self, packs: Sequence[Pack]) -> None:
        for pack in packs:
            pack.pins -= 1
            if pack.dirty and pack.present and not pack.pins:
                self._store.write(pack)
            elif not pack.present and not pack.pins:
                self._store.drop(pack)

    def _put_away(self, parameter: torch.Tensor, changed: bool) -> None:
        """Replace a gradient that was brought by the placeholder again."""
        pack, gradient = self._packs[parameter], parameter.grad
        if gradient is None or isinstance(gradient, SpentGradient):
            self._forget(parameter)
            return
        view = pack.view(parameter)
        if changed and gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        pack.dirty = pack.dirty or changed
        parameter.grad = self._placeholders[parameter]

    def _packs_of(self, parameters: Iterable[torch.Tensor]) -> list[Pack]:
        found = (self._packs.get(parameter) for parameter in parameters)
        return list(dict.fromkeys(pack for pack in found if pack is not None))

    def _is_away(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is self._placeholders[parameter]

    def _forget_cleared(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient is spilled; one that the user has cleared or replaced is forgotten."""
        pack = self._packs.get(parameter)
        if pack is None or parameter not in pack.present:
            return False
        if not self._is_away(parameter):
            self._forget(parameter)
            return False
        return True

    def _forget(self, parameter: torch.Tensor) -> None:
        pack = self._packs[parameter]
        pack.present.discard(parameter)
        if not pack.present and not pack.pins:
            self._filled.pop(pack, None)
            self._store.drop(pack)


def _is_taken(taken: Callable[[torch.Tensor], bool] | None, parameter: torch.Tensor) -> bool:
    return taken is not None and taken(parameter)


def _nothing_like(parameter: torch.Tensor) -> torch.Tensor:
    nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    return nothing.expand(parameter.shape)
