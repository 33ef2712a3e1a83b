"""kvikio's file handles: opened on a descriptor of ours, and never touched in a forked child."""

from __future__ import annotations

import ctypes
import os
import weakref

from tensorspill.gds.settings import opening_with

__all__ = ["Handle"]

_live: weakref.WeakSet[Handle] = weakref.WeakSet()


class Handle:
    """A `kvikio.CuFile` of a file that is open already.

    kvikio gets no path of the user's: it would follow links, and create files for everybody to
    read.

    Parameters
    ----------
    fd : int
        Descriptor of the file; kvikio opens it again, twice.
    writable : bool
    compat : bool
        Whether kvikio moves the bytes itself, through host memory.

    Attributes
    ----------
    file : kvikio.CuFile
    compat : bool

    Raises
    ------
    RuntimeError
        kvikio or cuFile refused; see `tensorspill.gds.failures.decode`.
    """

    def __init__(self, fd: int, writable: bool, compat: bool) -> None:
        import kvikio

        self.compat = compat
        self._pid = os.getpid()
        with opening_with(compat):
            self.file = kvikio.CuFile(f"/proc/self/fd/{fd}", "r+" if writable else "r")
        _live.add(self)

    @property
    def is_direct(self) -> bool:
        """Whether kvikio could open the file with O_DIRECT."""
        return bool(self.file.is_direct_io_supported())

    def close(self) -> None:
        """Deregister and close; nothing may be under way. A second time does no harm."""
        if os.getpid() == self._pid:
            self.file.close()


def _leak_in_child() -> None:
    """Let a forked child never destroy a handle: cuFile's state is the parent's."""
    for handle in list(_live):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle.file))


os.register_at_fork(after_in_child=_leak_in_child)
