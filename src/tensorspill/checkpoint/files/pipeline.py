"""Transfers under way, oldest first, and what is done when each has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tensorspill.engine.transfer import Transfer
from tensorspill.pool.buffer import Buffer

__all__ = ["Pipeline"]


class Pipeline:
    """Keeps a few transfers under way and looks after their staging buffers.

    Leaving the context with an error cancels what is under way and waits for it, so that no memory
    is given back while an engine uses it.

    Parameters
    ----------
    depth : int
        Transfers under way at most.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._live: deque[tuple[Transfer, Callable[[], None], Buffer | None]] = deque()

    def put(self, transfer: Transfer, finish: Callable[[], None], buffer: Buffer | None) -> None:
        """Add a transfer; wait for the oldest if there are too many.

        Parameters
        ----------
        transfer : Transfer
        finish : callable
            Called in this thread when the transfer has ended well.
        buffer : Buffer, optional
            Released after that.
        """
        self._live.append((transfer, finish, buffer))
        while len(self._live) > self._depth:
            self.retire()

    def retire(self) -> bool:
        """Wait for the oldest transfer and finish it; False if there is none."""
        if not self._live:
            return False
        transfer, finish, buffer = self._live[0]
        transfer.result()
        finish()
        self._live.popleft()
        if buffer is not None:
            buffer.release()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                while self.retire():
                    pass
            finally:
                self.stop()
        else:
            self.stop()

    def stop(self) -> None:
        """Cancel what is under way, wait for it, and give its memory back."""
        for transfer, _, _ in self._live:
            transfer.cancel()
        for transfer, _, buffer in self._live:
            transfer.exception()
            if buffer is not None:
                buffer.release()
        self._live.clear()
