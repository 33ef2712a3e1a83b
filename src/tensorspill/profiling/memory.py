"""Memory of every kind that points move: filled, poisoned and compared in the same words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from tensorspill.errors import CorruptError, UnsupportedError
from tensorspill.pool.slab import Slab
from tensorspill.profiling.content import check_same, cut, ordinary_tensor, page_aligned, poison

__all__ = ["Memory", "open_memory"]

_POISON = 0xA5
_MAKERS: Mapping[str, Callable[[int], torch.Tensor]] = {
    "aligned": page_aligned,
    "small-pages": partial(page_aligned, huge_pages=False),
    "ordinary": ordinary_tensor,
}


class Memory(ABC):
    """Some tensors that a point moves, in order.

    Attributes
    ----------
    tensors : sequence
        What requests take: uint8 tensors, or buffers on a GPU.
    gpu : str or None
        The GPU, for rows.
    """

    tensors: Sequence[Any]
    gpu: str | None = None

    @abstractmethod
    def fill(self, content: torch.Tensor) -> None:
        """Copy a uint8 host tensor of the same bytes into it."""

    @abstractmethod
    def poison(self) -> None:
        """Fill it so that a byte that is not read shows."""

    @abstractmethod
    def check(self, content: torch.Tensor) -> None:
        """Raise `CorruptError` unless it holds `content`."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_memory(device: str, kind: str, nbytes: int, tensor_bytes: int | None = None) -> Memory:
    """Take memory on a device.

    Parameters
    ----------
    device : str
    kind : {"aligned", "small-pages", "ordinary", "pinned"}
        Of host memory.
    nbytes : int
    tensor_bytes : int, optional
        Of each tensor, the last perhaps smaller; one tensor if not given.

    Raises
    ------
    UnsupportedError
        There is no such device, or its driver does not page-lock.
    """
    each = tensor_bytes or nbytes
    if device == "cpu":
        return _Host(kind, nbytes, each)
    return _Device(device, nbytes, each)


class _Host(Memory):
    def __init__(self, kind: str, nbytes: int, each: int) -> None:
        self._slab: Slab | None = None
        if kind == "pinned":
            self._slab = Slab(nbytes, page_lock="yes")
            self._whole: torch.Tensor | None = self._slab.tensor
        else:
            self._whole = _MAKERS[kind](nbytes)
        self.tensors = cut(self._whole, each)

    @property
    def whole(self) -> torch.Tensor:
        """All of it as one tensor."""
        if self._whole is None:
            raise UnsupportedError("The memory was given back")
        return self._whole

    def fill(self, content: torch.Tensor) -> None:
        self.whole.copy_(content)

    def poison(self) -> None:
        poison(self.whole)

    def check(self, content: torch.Tensor) -> None:
        check_same(self.whole, content, "host memory")

    def close(self) -> None:
        self.tensors, self._whole = (), None
        if self._slab is not None:
            self._slab.close()


class _Device(Memory):
    """Buffers on a GPU; the driver copies, since torch need not have CUDA."""

    def __init__(self, device: str, nbytes: int, each: int) -> None:
        from tensorspill.pool.buffer_pool import BufferPool
        from tensorspill.pool.cuda.contexts import normal_device

        self._index: int = normal_device(device).index
        self._stack = ExitStack()
        room = sum(-(-size // 4096) * 4096 for size in _sizes(nbytes, each))
        with self._stack as stack:
            pool = stack.enter_context(BufferPool(room, f"cuda:{self._index}"))
            self.tensors = [pool.allocate(size) for size in _sizes(nbytes, each)]
            for buffer in self.tensors:
                stack.callback(buffer.release)
            self.gpu = f"cuda:{self._index} {_gpu_name(self._index)}".strip()
            self._stack = stack.pop_all()

    def _each(self, name: str, content: torch.Tensor | None) -> None:
        from tensorspill.pool.cuda.contexts import current
        from tensorspill.pool.cuda.driver import call

        begin = 0
        with current(self._index):
            for buffer in self.tensors:
                if content is None:
                    call("cuMemsetD8", buffer.address, _POISON, buffer.nbytes)
                elif name == "cuMemcpyHtoD":
                    call(name, buffer.address, content.data_ptr() + begin, buffer.nbytes)
                else:
                    call(name, content.data_ptr() + begin, buffer.address, buffer.nbytes)
                begin += buffer.nbytes
            call("cuCtxSynchronize")

    def fill(self, content: torch.Tensor) -> None:
        self._each("cuMemcpyHtoD", content)

    def poison(self) -> None:
        self._each("cuMemsetD8", None)

    def check(self, content: torch.Tensor) -> None:
        found = torch.empty_like(content)
        self._each("cuMemcpyDtoH", found)
        if not np.array_equal(found.numpy(), content.numpy()):
            raise CorruptError(f"{self.gpu}: the bytes read are not the bytes written")

    def close(self) -> None:
        self.tensors = ()
        self._stack.close()


def _sizes(nbytes: int, each: int) -> list[int]:
    return [min(each, nbytes - begin) for begin in range(0, nbytes, each)]


def _gpu_name(index: int) -> str:
    from tensorspill.pool.cuda.driver import call

    name: bytes = call("cuDeviceGetName", 100, index)
    return name.decode(errors="replace").strip("\0 ")
