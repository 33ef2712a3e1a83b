"""Page-locking host memory for a GPU's copy engines.

Nothing here touches CUDA until `PageLock` is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tensorspill.errors import SpillError, UnsupportedError
from tensorspill.pool.cuda.contexts import count, current
from tensorspill.pool.cuda.driver import call

__all__ = ["PageLock"]

#: CU_MEMHOSTREGISTER_PORTABLE: page-locked for all contexts, not only for the one that registers.
_PORTABLE = 1


class PageLock:
    """Host memory registered with the CUDA driver, until `release`.

    Parameters
    ----------
    memory : ndarray
        A range that begins at a page. Held until `release`, so that it stays mapped.

    Raises
    ------
    UnsupportedError
        There is no driver, no GPU or no cuda-python, or the driver refuses; nothing is held.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._address = memory.ctypes.data
        self._pid = os.getpid()
        try:
            with _some_context():
                call("cuMemHostRegister", self._address, memory.nbytes, _PORTABLE)
        except SpillError as error:
            raise UnsupportedError(f"Not page-locked: {error.message}") from error
        self._memory: NDArray[np.uint8] | None = memory

    def release(self) -> None:
        """Unregister the memory; a second time, or in a forked child, does nothing."""
        memory, self._memory = self._memory, None
        if memory is None or os.getpid() != self._pid:
            return
        try:
            with _some_context():
                call("cuMemHostUnregister", self._address)
        except SpillError:
            pass  # The driver is being torn down and has let go of the memory already.


@contextmanager
def _some_context() -> Iterator[None]:
    """Use the thread's context, else the primary one of this rank's own GPU."""
    if int(call("cuCtxGetCurrent")):
        yield
        return
    # Every rank on GPU 0 would cost its memory once for each rank.
    with current(_local_rank() % count()):
        yield


def _local_rank() -> int:
    rank = os.environ.get("LOCAL_RANK", "0")
    return int(rank) if rank.isdecimal() else 0
