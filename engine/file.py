"""A file opened by an engine."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tensorspill.engine.ledger import Ledger
from tensorspill.errors import BrokenError, ClosedError

__all__ = ["File"]


class File:
    """A file that requests name; made by `Engine.open`, closed by you or with its engine.

    Attributes
    ----------
    path : str
        Absolute path.
    fd : int
        A descriptor, owned by this object; it may be one with O_DIRECT.
    writable : bool
        Whether the mode allows writes.
    ledger : Ledger
        Of the engine that opened it.
    memory_alignment : int
        Multiple, in bytes, that an address must be for its bytes to move without a copy, wherever
        the file offset is a multiple of it too; 1 if any address will do.
    copies_cheaply : bool
        Whether bytes of ordinary memory move faster through staging blocks than straight from where
        they are, so that aligning a file's content with its memory does not pay.
    granule : int
        Unit of whole blocks in bytes: writes of less than that may touch what is beside them.
    exclusive : bool
        Set it to promise that no two requests share a granule of the file: writes may
        then overwrite the rest of the blocks they touch, with zeros.
    """

    memory_alignment: int = 1
    copies_cheaply: bool = False
    granule: int = 4096
    exclusive: bool = False

    def __init__(
        self, path: str, fd: int, writable: bool, ledger: Ledger, release: Callable[[], None]
    ) -> None:
        self.path = path
        self.fd = fd
        self.writable = writable
        self.ledger = ledger
        self._release = weakref.finalize(self, release)
        # At exit the kernel closes descriptors; closing one early would break what is under way.
        self._release.atexit = False

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return not self._release.alive

    def check_open(self) -> None:
        """Raise `ClosedError` if the file was closed."""
        if self.closed:
            raise ClosedError("The file is closed", path=self.path)

    @property
    def size(self) -> int:
        """Length in bytes now.

        Raises
        ------
        ClosedError
            The file was closed.
        """
        self.check_open()
        return os.fstat(self.fd).st_size

    def sync(self) -> None:
        """Make all bytes of ended transfers durable (fsync).

        Raises
        ------
        BrokenError
            The drive could not keep them; what is on it is undefined since the last `sync`.
        """
        self.check_open()
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise BrokenError.from_oserror(error, "fsync failed", path=self.path) from error

    def close(self) -> None:
        """Wait for the file's transfers, then close it; a second time does no harm."""
        if self._release.alive:
            self.ledger.wait_idle(self)
            self._release()

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
        return f"<{type(self).__name__} {self.path!r}{' closed' if self.closed else ''}>"
