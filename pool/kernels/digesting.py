"""The pool's digest of many tensors, computed where they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tensorspill.errors import UnsupportedError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.digest import digest, finished
from tensorspill.pool.kernels import torch_digest, triton_launch
from tensorspill.pool.kernels.host_copies import begin_copies

__all__ = ["Digesting", "begin_digests"]


class Digesting:
    """Digests under way; see `begin_digests`."""

    def __init__(self, values: Callable[[], list[int]]) -> None:
        self._values = values

    def values(self) -> list[int]:
        """Wait for the digests and return them, one for each tensor; once."""
        return self._values()


def begin_digests(arrays: Sequence[Any], *, after_current: bool = True) -> Digesting:
    """Begin to compute the digest of each tensor; values as `tensorspill.pool.digest`.

    On a GPU the kernels run on a stream of their own, so that digests overlap with whatever else
    is moved or computed; nothing but 8 bytes for each tensor crosses the bus. On the CPU they are
    computed by `Digesting.values`, in the thread that calls it.

    Parameters
    ----------
    arrays : sequence of torch.Tensor, Buffer, or CUDA array
        Contiguous, all on one device, at any address. They must not change before the digests are
        there. GPU memory of which torch has no tensors is copied to the host by the driver.
    after_current : bool
        Whether what the current stream of their device is doing comes first. Not needed for memory
        that is known to be complete.

    Raises
    ------
    UnsupportedError
        They are not contiguous, or on several devices.
    """
    found = [_tensor_of(array) for array in arrays]
    tensors = [tensor for tensor in found if tensor is not None]
    if len(tensors) < len(arrays):
        return Digesting(begin_copies(arrays, after_current))
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise UnsupportedError(f"Tensors on several devices: {sorted(map(str, devices))}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise UnsupportedError("A tensor is not contiguous")
    device = devices.pop() if devices else torch.device("cpu")
    if device.type == "cuda":
        return Digesting(_begun(tensors, device, after_current))
    if device.type != "cpu":
        raise UnsupportedError(f"No digests of memory on {device}")
    if triton_launch.interpreted():
        return Digesting(partial(_interpreted, tensors))
    return Digesting(partial(list, map(digest, tensors)))


def _tensor_of(array: Any) -> torch.Tensor | None:
    """Return an array as a tensor of torch's; None for GPU memory where torch has no CUDA."""
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, Buffer):
        return array.tensor if array.has_tensor else None
    if not torch.cuda.is_available():
        return None
    try:
        return torch.as_tensor(array, device="cuda")
    except Exception as error:
        raise UnsupportedError(f"A {type(array).__name__} can't be digested: {error}") from error


def _begun(
    tensors: list[torch.Tensor], device: torch.device, after_current: bool
) -> Callable[[], list[int]]:
    """Queue the kernels and the copy of their sums; return what waits for them."""
    with triton_launch.on_device(device):
        stream = _stream(device)
        if after_current:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            sums = _sums(tensors, device)
            found = torch.empty(len(tensors), dtype=torch.int64, pin_memory=True)
            found.copy_(sums, non_blocking=True)
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)

    def values() -> list[int]:
        done.synchronize()
        return _finished(found, tensors)

    return values


def _interpreted(tensors: list[torch.Tensor]) -> list[int]:
    return _finished(_sums(tensors, torch.device("cpu")), tensors)


def _sums(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    def sums(add: Callable[[Sequence[torch.Tensor], torch.Tensor], None]) -> torch.Tensor:
        fresh = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        add(tensors, fresh)
        return fresh

    return triton_launch.attempt(
        partial(sums, triton_launch.launch_sums), partial(sums, torch_digest.sum_words)
    )


def _finished(sums: torch.Tensor, tensors: list[torch.Tensor]) -> list[int]:
    pairs = zip(sums.tolist(), tensors, strict=True)
    return [finished(total, tensor.nbytes) for total, tensor in pairs]


_streams: dict[torch.device, Any] = {}
_making = threading.Lock()


def _stream(device: torch.device) -> Any:
    """Return this process's stream for digests on a device."""
    with _making:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device]
