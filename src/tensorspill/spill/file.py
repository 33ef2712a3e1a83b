"""A spill file: named tensors that live on drives."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.engine.statistics import TransferRecord
from tensorspill.engine.transfer import Transfer, gather
from tensorspill.errors import CapacityError, NoSpaceError
from tensorspill.pool.sizes import parse_bytes
from tensorspill.spill.catalog import Catalog
from tensorspill.spill.digests import Digests
from tensorspill.spill.drives import open_drives, prepare
from tensorspill.spill.folder import Claim
from tensorspill.spill.items import Item, Tensors, check_items, check_overlaps
from tensorspill.spill.jobs import Job, Watcher
from tensorspill.spill.plans import Extent, Plan
from tensorspill.spill.records import Location, SpillStatistics, StoredTensor
from tensorspill.spill.space import Growth
from tensorspill.spill.tickets import Ticket

__all__ = ["SpillFile"]

Folder = str | os.PathLike[str]
P = TypeVar("P", Plan, None)
R = TypeVar("R")


class SpillFile:
    """Tensors by name, in one preallocated file for each folder.

    Like a dictionary whose operations take effect in the order of the calls, although the bytes
    move later: a `get` or `put` of a name whose `put` is under way first waits for that one. A
    batch is atomic: if any of it can't be done, nothing has changed.

    A `put` of a stored name writes beside the old bytes, which stay readable if it fails. Only
    where there is no room for both does it overwrite them; a failure then makes the tensor *torn*:
    `get` raises `BrokenError` until the next good `put`.

    May be used from any thread, but not from the callback of a transfer. A forked child can't use
    it, and leaves its files alone.

    Parameters
    ----------
    folder : str, path, or sequence of these
        Where; missing folders are made. The file lies in a folder of ours inside it, see
        `SpillFolder`. Of several folders, each on a drive of its own, large tensors are striped
        over all and small ones go to each in turn.
    capacity : int or str, optional
        Bytes that all tensors can take together, each rounded up to blocks of 4096; allocated at
        once, with 1/256 more. Without it the files grow as needed.
    device : str or torch.device
        Where the tensors are.
    backend : str
        See `open_engine`.
    verify : bool
        Keep a digest of every tensor, and check it whenever one is read.
    **options
        Of the engines, see `open_engine`.

    Raises
    ------
    UnsupportedError, PermissionDeniedError, NoSpaceError, BrokenError
        A folder can't be used, has no room, or an option is wrong; nothing is left behind.

    Examples
    --------
    >>> with SpillFile("/mnt/nvme") as spill:  # doctest: +SKIP
    ...     spill.put({"weight": weight}).result()
    ...     spill.get({"weight": torch.empty_like(weight)}).result()
    """

    def __init__(
        self,
        folder: Folder | Sequence[Folder],
        capacity: int | str | None = None,
        device: str | torch.device = "cpu",
        backend: str = "auto",
        verify: bool = False,
        **options: Any,
    ) -> None:
        folders = [folder] if isinstance(folder, str | os.PathLike) else list(folder)
        limit = None if capacity is None else parse_bytes(capacity)
        self._drives, space = open_drives(folders, limit, device, backend, options)
        self.device = self._drives[0].engine.device
        self.paths = tuple(drive.claim.path for drive in self._drives)
        self._catalog = Catalog(space, self.paths[0])
        self._digests = Digests() if verify else None
        self._growing = threading.Lock()
        self._end = weakref.finalize(self, _release, [drive.claim for drive in self._drives])

    # -- putting and getting ---------------------------------------------------------------------

    def put(self, tensors: Tensors) -> Transfer:
        """Store tensors under their names, in place of what was there.

        Parameters
        ----------
        tensors : mapping of str to torch.Tensor or Buffer
            Contiguous, on the spill file's device. The transfer owns their memory until it ends:
            it must not be written before.

        Returns
        -------
        Transfer
            If it fails or is cancelled, the names have what they had before (or are torn, see the
            class).

        Raises
        ------
        UnsupportedError
            A tensor can't be stored as it is.
        CapacityError, NoSpaceError
            There is no room.
        ClosedError
            Closed, or a forked child.
        """
        return self.begin_put(tensors, None)

    def get(self, tensors: Tensors) -> Transfer:
        """Read stored tensors into given ones.

        Parameters
        ----------
        tensors : mapping of str to torch.Tensor or Buffer
            Contiguous, on the spill file's device, with the dtype and the number of elements of
            what is stored. The transfer owns their memory until it ends: it must not be used
            before.

        Returns
        -------
        Transfer
            If it fails or is cancelled, the destinations are undefined. With ``verify`` it fails
            with `CorruptError` if the bytes are not those that were put.

        Raises
        ------
        MissingNameError
            A name is not stored.
        UnsupportedError
            A destination doesn't match, or two overlap.
        BrokenError
            A tensor is torn.
        ClosedError
            Closed, or a forked child.
        """
        return self.begin_get(tensors, None)

    def begin_put(self, tensors: Tensors, watcher: Watcher | None) -> Transfer:
        """Do what `put` does, and tell a watcher of the end."""
        items = self._items(tensors)
        launch = partial(self._launch, write=True, watcher=watcher)
        return self._carry_out(partial(self._catalog.plan_put, items), launch)

    def begin_get(self, tensors: Tensors, watcher: Watcher | None) -> Transfer:
        """Do what `get` does, and tell a watcher of the end."""
        items = self._items(tensors)
        if len(self._drives) > 1:
            check_overlaps(items)
        launch = partial(self._launch, write=False, watcher=watcher)
        return self._carry_out(lambda _: self._catalog.plan_get(items), launch)

    def delete(self, name: str) -> None:
        """Forget a tensor, after its `put` if that is under way.

        Its room is used again when no `get` reads it any more.

        Raises
        ------
        MissingNameError
            Nothing is stored or reserved under this name.
        ClosedError
            Closed, or a forked child.
        """
        self._carry_out(lambda _: self._catalog.delete(name), lambda _: None)

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Take room for tensors that will be put later; for all of them, or for none.

        Names that are stored or have room already keep what they have. `delete` gives back the
        room of a name that was never put.

        Parameters
        ----------
        sizes : mapping of str to int
            Bytes for each name.

        Raises
        ------
        CapacityError, NoSpaceError
            There is no room; nothing changed.
        ClosedError
            Closed, or a forked child.
        """
        self._carry_out(partial(self._catalog.reserve, sizes), lambda _: None)

    # -- questions -------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        """Whether a tensor of this name is stored, or being stored."""
        return name in self._catalog

    def __len__(self) -> int:
        return len(self._catalog.names())

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog.names())

    def size_of(self, name: str) -> int:
        """Return the bytes of a tensor: of the one that is being put, if one is.

        Raises
        ------
        MissingNameError, ClosedError
        """
        return self._catalog.find(name).nbytes

    def meta(self, name: str) -> StoredTensor:
        """Return what is known of a tensor: of the one that is being put, if one is.

        Raises
        ------
        MissingNameError, ClosedError
        """
        extent = self._catalog.find(name)
        return StoredTensor(
            name,
            tuple(extent.shape),
            extent.dtype,
            extent.nbytes,
            self._locations(extent),
            extent.digest,
            extent.torn,
        )

    def location(self, name: str) -> tuple[Location, ...]:
        """Return where the bytes of a tensor are, in order.

        Raises
        ------
        MissingNameError, ClosedError
        """
        return self._locations(self._catalog.find(name))

    def statistics(self) -> SpillStatistics:
        """Return the state and what was done so far; works after `close` as well."""
        engines = tuple(drive.engine.statistics() for drive in self._drives)
        return SpillStatistics(**self._catalog.figures(), engines=engines)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._catalog.closed

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all transfers and remove the files; a second time does no harm.

        A forked child does nothing. What is dropped without `close` removes its files as well.
        """
        if self._catalog.forked or not self._end.alive:
            return
        while (ticket := self._catalog.close()) is not None:
            ticket.wait()
        if self._digests is not None:
            self._digests.close()
        with self._growing:
            for drive in self._drives:
                drive.close()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SpillFile {', '.join(self.paths)}{' closed' if self.closed else ''}>"

    # -- how it is done --------------------------------------------------------------------------

    def _items(self, tensors: Tensors) -> list[Item]:
        # Of several drives, each gets a slice of a tensor.
        return check_items(tensors, self.device, only_tensors=len(self._drives) > 1)

    def _carry_out(
        self, attempt: Callable[[Collection[int]], P | Growth | Ticket], begin: Callable[[P], R]
    ) -> R:
        """Try until there is a plan, waiting and growing files in between; then begin.

        A Ctrl-C comes before a plan is made or after it was begun, never in between.
        """
        # Before any lock is taken: in a forked child nobody may ever let go of it.
        self._catalog.check_open()
        refused: dict[int, NoSpaceError] = {}
        while True:
            begun = None
            try:
                with HeldInterrupts():
                    outcome = attempt(refused.keys())
                    if not isinstance(outcome, Growth | Ticket):
                        # Kept, since the block may end with an interrupt.
                        begun = begin(outcome)
                        return begun  # noqa: RET504
            except KeyboardInterrupt:
                # It came while a transfer was begun that nobody will get hold of.
                if isinstance(begun, Transfer):
                    begun.cancel()
                raise
            except CapacityError as error:
                if refused:
                    raise next(iter(refused.values())) from error
                raise
            if isinstance(outcome, Ticket):
                outcome.wait()
            else:
                self._grow(outcome, refused)

    def _grow(self, growth: Growth, refused: dict[int, NoSpaceError]) -> None:
        """Make a file longer, or note that it can't be now."""
        with self._growing:
            if self._catalog.file_size(growth.drive) >= growth.needed:
                return  # another thread was faster
            try:
                size = self._drives[growth.drive].grow(growth)
            except NoSpaceError as error:
                refused[growth.drive] = error
            else:
                self._catalog.grown(growth.drive, size)

    def _launch(self, plan: Plan, write: bool, watcher: Watcher | None) -> Transfer:
        """Begin the transfer of a plan; whatever happens, the plan is settled."""
        # None of what outlives this call may hold `self`, which would never be collected.
        job = Job(plan, write, self._catalog, self._digests, watcher)
        parts: list[Transfer] = []
        try:
            batches = prepare(self._drives, plan, write)
            if write and self._digests is not None:
                parts.append(self._digests.record(plan))
            for engine, batch in batches:
                parts.append(engine.submit(batch))
        except BaseException as error:
            if not parts:
                job.abandon(error)
                raise
            for part in parts:
                part.cancel()
            gather(parts, job.end)
            raise
        whole = gather(parts, job.end, job.run)
        whole.add_done_callback(partial(_let_go, parts))
        return whole

    def _locations(self, extent: Extent) -> tuple[Location, ...]:
        return tuple(
            Location(self.paths[piece.drive], piece.offset, piece.nbytes)
            for piece in extent.pieces
            if piece.nbytes
        )


def _let_go(parts: list[Transfer], _: Future[TransferRecord]) -> None:
    """Take ended parts and their batches apart, which refer to each other.

    Else the tensors that were moved would stay in memory until the garbage collector comes.
    """
    for part in parts:
        part.on_cancel(_nothing)
    parts.clear()


def _nothing() -> None:
    """Cancel what has ended."""


def _release(claims: list[Claim]) -> None:
    """Remove the files of a spill file that was dropped."""
    for claim in claims:
        claim.release()
