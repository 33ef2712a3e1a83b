"""A site: the folder that is measured, with one file in it whose content is known."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from tensorspill.engine.request import Request
from tensorspill.errors import CapacityError, CorruptError
from tensorspill.opening import open_engine
from tensorspill.pool.sizes import format_bytes
from tensorspill.profiling.content import page_aligned, randomize
from tensorspill.profiling.files import written_file
from tensorspill.profiling.host import memory_available
from tensorspill.profiling.page_cache import drop_pages
from tensorspill.profiling.place import working_folder
from tensorspill.topology.discovery.finding import discover
from tensorspill.topology.discovery.paths import Storage, device_of
from tensorspill.topology.machine import Machine

__all__ = ["Site"]

NAME = "data"
_CHUNK = 8 << 20


class Site:
    """A working folder below `path`, with a file of `nbytes` that was written before.

    The file holds `expected`, or what fio wrote since: see `restore`. The first write of a file's
    blocks is slower than all that follow on most file systems, so it happens here. Until `close`,
    torch computes in one thread.

    Parameters
    ----------
    path : path-like
        Where to measure. Nothing there is touched but a folder of our own, which `close` removes.
    nbytes : int
        Size of the file. Twice as much memory is used.

    Attributes
    ----------
    path : str
        As given, absolute.
    folder, file : Path
        The working folder, and the file in it.
    expected : torch.Tensor
        uint8, 1-D tensor of the host: what the file holds.
    storage : Storage
        What is below the folder.
    first_write_gbps : float
        At which rate the file was written for the first time.

    Raises
    ------
    NoSpaceError
        The file system would be nearly full.
    CapacityError
        There is too little memory.
    MissingFileError, PermissionDeniedError, BrokenError
        No folder can be made there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        nbytes: int,
        tick: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path = os.path.abspath(path)
        self.nbytes = nbytes
        _check_memory(nbytes)
        with ExitStack() as stack:
            # Comparing must not leave spinning threads behind, whose CPU time would count as ours.
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            self.folder = stack.enter_context(working_folder(self.path, nbytes))
            self.storage: Storage = device_of(self.folder)
            tick(f"writing a file of {format_bytes(nbytes)}")
            begun = time.perf_counter()
            self.file: Path = written_file(self.folder / NAME, nbytes)
            self.first_write_gbps = nbytes / (time.perf_counter() - begun) / 1e9
            self.expected = page_aligned(nbytes)
            randomize(self.expected)
            self.dirty = True
            self._stack = stack.pop_all()

    @functools.cached_property
    def machine(self) -> Machine:
        """The machine, as `tensorspill topo` shows it."""
        return discover()

    @property
    def numbers(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """`expected` as an array of numpy's."""
        array: np.ndarray[tuple[int], np.dtype[np.uint8]] = self.expected.numpy()
        return array

    def restore(self) -> None:
        """Write `expected` to the file, if something else has written there since."""
        if not self.dirty:
            return
        with open_engine(self.folder, backend="aio") as engine, engine.open(NAME, "r+") as file:
            engine.submit([Request(self.expected, file, write=True)]).result()
            file.sync()
        drop_pages(self.file)
        self.dirty = False

    def check_file(self, nbytes: int) -> None:
        """Read the first bytes of the file by system calls, and compare all with `expected`.

        Raises
        ------
        CorruptError
            They differ.
        """
        drop_pages(self.file)
        chunk = bytearray(_CHUNK)
        with self.file.open("rb", buffering=0) as file:
            for begin in range(0, nbytes, _CHUNK):
                wanted = self.numbers[begin : min(begin + _CHUNK, nbytes)]
                got = file.readinto(memoryview(chunk)[: len(wanted)])
                if got != len(wanted) or not np.array_equal(
                    np.frombuffer(chunk, np.uint8, got), wanted
                ):
                    raise CorruptError(
                        "The file does not hold what was written",
                        path=self.file,
                        offset=begin,
                        nbytes=len(wanted),
                    )
        drop_pages(self.file)

    def close(self) -> None:
        """Remove the file and the folder; a second time does no harm."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_memory(nbytes: int) -> None:
    """Refuse to measure what would be swapped out: content, the tensors, and room for others."""
    needed, available = 2 * nbytes + (64 << 20), memory_available()
    if needed > available:
        raise CapacityError(
            "Too little memory to measure with",
            asked=needed,
            free=available,
            largest=available,
            remedy="Ask for a smaller size",
        )
