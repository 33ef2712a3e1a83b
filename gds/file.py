"""A file of the GDS engine: kvikio's handle, and the host path's file once that is needed."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass

from tensorspill.engine.file import File
from tensorspill.engine.folder import Folder
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.preallocation import preallocate
from tensorspill.errors import SpillError, UnsupportedError
from tensorspill.gds.failures import Failure, decode
from tensorspill.gds.fallback import Fallback
from tensorspill.gds.handle import Handle
from tensorspill.gds.options import PAGE

__all__ = ["GdsFile", "Way", "open_file"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine opens files.

    Attributes
    ----------
    modes : tuple of bool
        What to try in turn: kvikio's compatibility mode if true, cuFile if not.
    direct : {"auto", "yes", "no"}
        See `GdsOptions`.
    """

    modes: tuple[bool, ...]
    direct: str
    ledger: Ledger
    fallback: Fallback


class GdsFile(File):
    """A file that kvikio moves bytes of.

    Attributes
    ----------
    handle : Handle or None
        None if the file had to fall back when it was opened.
    host : File or None
        The same file in the host path's engine, once this one fell back; it stays so.
    why_host : str
        Why it fell back.
    fallback : Fallback
        Shared by the engine's files.
    """

    fallback: Fallback

    handle: Handle | None = None
    host: File | None = None
    why_host: str = ""
    memory_alignment = PAGE
    granule = PAGE

    def attach(self, name: str, held: _Held, fallback: Fallback) -> None:
        """Say by which name, and to what, the file falls back; called once, by `open_file`."""
        self._name = name
        self._held = held
        self.fallback = fallback
        self._turning = threading.Lock()

    @property
    def is_compat(self) -> bool:
        """Whether kvikio moves the bytes through host memory."""
        return self.handle is not None and self.handle.compat

    def forget_handle(self) -> None:
        """Give kvikio's handle back; nothing may be under way, and no transfer may follow."""
        if self.handle is not None:
            self.handle.close()

    def fall_back(self, failure: Failure) -> bool:
        """Have the host path move the file's bytes from now on; False if it can't.

        Counted and logged once for each file.
        """
        with self._turning:
            if self.host is not None:
                return True
            if not self.fallback.is_there:
                return False
            try:
                host = self.fallback.open(self._name, "r+" if self.writable else "r")
            except SpillError as error:
                log.warning("%s: no fallback to the host path: %s", self.path, error)
                return False
            if not os.path.sameopenfile(host.fd, self.fd):
                # Removed or replaced since; the name leads to another file.
                host.close()
                return False
            self.why_host = f"GPUDirect Storage failed on this file: {failure.text}"
            self.host = host
            self.fallback.files += 1
            self._held.hosts.append(host)
        self.ledger.note(f"{self.path}: host path, since {self.why_host}")
        log.warning("%s: going on by the host path. %s", self.path, self.why_host)
        return True


class _Held:
    """What an open file holds; a part of its own, since `File` is released without the file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.handle: Handle | None = None
        self.hosts: list[File] = []

    def close(self) -> None:
        """Let go of everything; a second time does no harm.

        The kernel closes a descriptor even if it has something to complain about.
        """
        if self.fd < 0:
            return
        if self.handle is not None:
            self.handle.close()
        for host in self.hosts:
            host.close()
        fd, self.fd = self.fd, -1
        try:
            os.close(fd)
        except OSError as error:
            log.warning("A file was closed with an error: %s", error)


def open_file(folder: Folder, name: str, flags: int, size: int | None, way: Way) -> GdsFile:
    """Open a file, preallocate it and hand it to kvikio.

    Raises
    ------
    BrokenError
        The operating system or cuFile refused; a file that this call created is removed again.
    UnsupportedError
        ``direct="yes"`` and the file system has no direct I/O.
    """
    path = os.path.join(folder.path, name)
    existed = flags & os.O_CREAT == 0 or os.path.lexists(path)
    held = _Held(folder.open(name, flags))
    try:
        if size is not None:
            preallocate(held.fd, size, path, way.ledger)
        file = GdsFile(path, held.fd, flags & os.O_ACCMODE != os.O_RDONLY, way.ledger, held.close)
        file.attach(name, held, way.fallback)
        _hand_over(file, held, way)
    except BaseException:
        held.close()
        if not existed:
            os.unlink(name, dir_fd=folder.fd)
        raise
    return file


def _hand_over(file: GdsFile, held: _Held, way: Way) -> None:
    """Give the file to kvikio as the way says, or to the host path where that fails."""
    failure = None
    for compat in way.modes:
        try:
            file.handle = held.handle = Handle(file.fd, file.writable, compat)
        except RuntimeError as error:
            failure = decode(error)
            if failure.may_fall_back and file.fall_back(failure):
                return
            continue
        if failure is not None:
            way.ledger.note(f"{file.path}: kvikio's compatibility mode, since {failure.text}")
        if compat and way.direct == "yes" and not held.handle.is_direct:
            raise UnsupportedError(
                "Direct I/O was asked for and the file system refuses O_DIRECT", path=file.path
            )
        return
    if failure is not None:
        raise failure.error("Opening the file", path=file.path)
