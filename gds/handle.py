"""kvikio's file handles: opened on a descriptor of ours, and never touched in a forked child."""

from __future__ import annotations

import ctypes
import os
import weakref

from tensorspill.gds.settings import opening_with

__all__ = ["Handle"]

_live: weakref.WeakSet[Handle] = weakref.WeakSet()
#: Not empty once a handle was made.
_used: set[bool] = set()


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
        _used.add(True)

    @property
    def is_direct(self) -> bool:
        """Whether kvikio could open the file with O_DIRECT."""
        return bool(self.file.is_direct_io_supported())

    def close(self) -> None:
        """Deregister and close; nothing may be under way. A second time does no harm."""
        if os.getpid() == self._pid:
            self.file.close()


def _after_fork_in_child() -> None:
    """Keep a forked child from calling cuFile, and from waiting for kvikio's threads at its end."""
    handles = list(_live)
    for handle in handles:
        # Never destroyed: cuFile's state is the parent's.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle.file))
    libc = ctypes.CDLL(None)
    if _used and hasattr(libc, "on_exit"):
        # What is registered last runs first, and gets the exit status: `_exit` leaves out the end
        # of kvikio's pool of threads, which waits for ever for threads that are the parent's.
        libc.on_exit(libc._exit, None)


os.register_at_fork(after_in_child=_after_fork_in_child)
