"""CUDA streams and events: our own, and the handles of those that others made."""

from __future__ import annotations

import operator
import weakref
from types import TracebackType
from typing import Any, Self

import torch

from tensorspill.errors import SpillError, UnsupportedError
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.driver import call, error_for, status

__all__ = ["Event", "Stream", "current_stream", "handle_of"]

#: CU_STREAM_NON_BLOCKING: the legacy default stream does not wait for it, nor it for that.
_NON_BLOCKING = 1

#: CU_EVENT_BLOCKING_SYNC, so that waiting takes no core, and CU_EVENT_DISABLE_TIMING.
_WAITABLE = 1 | 2


class _Handle:
    """Something of the driver's that is destroyed once."""

    def __init__(self, device: int, create: str, flags: int, destroy: str) -> None:
        with current(device):
            self._raw = call(create, flags)
        self.device = device
        self.handle = int(self._raw)
        self._end = weakref.finalize(self, _destroy, destroy, self._raw)
        # At exit the driver lets go of everything itself.
        self._end.atexit = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._end.alive

    def close(self) -> None:
        """Destroy it, once what it was told is done; a second time does no harm."""
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
        state = " closed" if self.closed else ""
        return f"<{type(self).__name__} {self.handle:#x} on cuda:{self.device}{state}>"


class Stream(_Handle):
    """A stream of our own, which does not wait for the legacy default stream.

    Parameters
    ----------
    device : int
        Number of the GPU.

    Attributes
    ----------
    handle : int
        The driver's ``CUstream``.

    Raises
    ------
    UnsupportedError
        There is no such device.
    """

    def __init__(self, device: int) -> None:
        super().__init__(device, "cuStreamCreate", _NON_BLOCKING, "cuStreamDestroy")

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of this protocol and the handle, for other libraries."""
        return 0, self.handle

    def wait(self, event: Event) -> None:
        """Let what is put on the stream from now on begin after the event."""
        wait_for(self.handle, event)

    def synchronize(self) -> None:
        """Wait until all that was put on the stream is done."""
        call("cuStreamSynchronize", self._raw)


class Event(_Handle):
    """A point in a stream that can be waited for.

    Parameters
    ----------
    device : int
        Number of the GPU whose streams it is recorded on.
    """

    def __init__(self, device: int) -> None:
        super().__init__(device, "cuEventCreate", _WAITABLE, "cuEventDestroy")

    def record(self, stream: Any) -> None:
        """Mark the present end of a stream (see `handle_of`) of the event's device.

        Raises
        ------
        UnsupportedError
            The stream belongs to another device or context, or is no stream.
        """
        handle = handle_of(stream)
        with current(self.device):
            code, _ = status("cuEventRecord", self._raw, handle)
        if code is not None:
            error = error_for("cuEventRecord", code)
            if isinstance(error, UnsupportedError):
                error.remedy = f"Use a stream of cuda:{self.device}"
            raise error

    def query(self) -> bool:
        """Whether everything before the event is done.

        Raises
        ------
        BrokenError
            The GPU failed.
        """
        code, _ = status("cuEventQuery", self._raw)
        if code not in (None, "CUDA_ERROR_NOT_READY"):
            raise error_for("cuEventQuery", code)
        return code is None

    def synchronize(self) -> None:
        """Wait until everything before the event is done; no core is kept busy."""
        call("cuEventSynchronize", self._raw)


def wait_for(stream: int, event: Event) -> None:
    """Let what is put on a stream, given by its handle, begin after the event."""
    with current(event.device):
        call("cuStreamWaitEvent", stream, event._raw, 0)


def handle_of(stream: Any) -> int:
    """Return the handle of a stream, however it comes.

    Parameters
    ----------
    stream : int, torch.cuda.Stream, cupy.cuda.Stream, numba stream, or with ``__cuda_stream__``
        0, 1 and 2 are the driver's default streams.

    Raises
    ------
    UnsupportedError
        It is none of these.
    """
    if isinstance(stream, bool) or stream is None:
        raise UnsupportedError(f"{stream!r} is no CUDA stream")
    try:
        if hasattr(stream, "__cuda_stream__"):
            protocol = stream.__cuda_stream__
            return int((protocol() if callable(protocol) else protocol)[1])
        for name in ("cuda_stream", "ptr", "handle"):
            if hasattr(stream, name):
                handle = getattr(stream, name)
                # numba has an object of ctypes or of cuda-python here.
                return int(getattr(handle, "value", handle) or 0)
        return operator.index(stream)
    except (TypeError, ValueError, IndexError) as error:
        raise UnsupportedError(f"{stream!r} is no CUDA stream") from error


def current_stream(device: int) -> int:
    """Return the handle of the stream that work on a device goes to now.

    That of torch, where torch uses the GPU, else the legacy default stream.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.current_stream(device).cuda_stream)
    return 0


def _destroy(function: str, handle: Any) -> None:
    try:
        status(function, handle)
    except SpillError:
        pass  # A forked child, whose parent has it.
