"""Points: what is measured, as frozen data, and the command that measures it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from tensorspill.errors import UnsupportedError

__all__ = ["DIRECTIONS", "MEMORIES", "Point", "size_text"]

DIRECTIONS = ("read", "write")

#: Of host memory: page-aligned and in huge pages as the library's pools are, the same in small
#: pages, as torch allocates it, or page-locked by the CUDA driver.
MEMORIES = ("aligned", "small-pages", "ordinary", "pinned")

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting to measure.

    Attributes
    ----------
    direction : {"read", "write"}
    total_bytes : int
        Bytes of one round.
    backend : {"auto", "aio", "gds"}
    device : str
        Where the tensors are: "cpu", "cuda:0".
    memory : {"aligned", "small-pages", "ordinary", "pinned"}
        Which host memory; of GPUs there is one kind.
    block_bytes, depth, threads : int
        Options of the engine.
    tensor_bytes : int or None
        Bytes of each tensor of the batch; None for one tensor.
    fsync : bool or None
        Whether writes end with an fsync; None for where they go through the page cache.
    numa : int or None
        NUMA node for the threads.

    Raises
    ------
    UnsupportedError
        A value is out of range.
    """

    direction: str
    total_bytes: int
    backend: str = "auto"
    device: str = "cpu"
    memory: str = "aligned"
    block_bytes: int = MIB
    depth: int = 32
    threads: int = 1
    tensor_bytes: int | None = None
    fsync: bool | None = None
    numa: int | None = None

    def __post_init__(self) -> None:
        tensor = self.tensor_bytes
        checks = (
            (self.direction in DIRECTIONS, f"A direction is read or write, not {self.direction!r}"),
            (self.memory in MEMORIES, f"Memory is {', '.join(MEMORIES)}, not {self.memory!r}"),
            (self.total_bytes > 0, "A point moves at least a byte"),
            (tensor is None or tensor > 0, "A tensor has at least a byte"),
            (self.depth > 0 and self.threads > 0, "Depth and threads are at least 1"),
        )
        for holds, message in checks:
            if not holds:
                raise UnsupportedError(message)

    @property
    def in_flight(self) -> int:
        """Bytes under way at most: what a setting costs."""
        return self.block_bytes * self.depth * self.threads

    @property
    def label(self) -> str:
        """The point in a few words, for people."""
        words = [self.direction, size_text(self.block_bytes), f"x {self.depth}"]
        if self.threads > 1:
            words.append(f"x {self.threads} threads")
        if self.tensor_bytes is not None:
            words.append(f"in tensors of {size_text(self.tensor_bytes)}")
        words.append(self.device if self.device != "cpu" else self.memory)
        return " ".join(words)

    def options(self) -> dict[str, Any]:
        """Return the engine's options."""
        found: dict[str, Any] = {
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            "threads": self.threads,
        }
        # Of the host path alone: given to "auto" it would choose that.
        return found if self.numa is None else found | {"numa_node": self.numa}

    def command(self, path: str, rounds: int) -> str:
        """Return the command that measures this point."""
        words = ["tensorspill", "bench", path, "--direction", self.direction]
        words += ["--block", size_text(self.block_bytes), "--depth", str(self.depth)]
        words += ["--threads", str(self.threads), "--size", size_text(self.total_bytes)]
        words += ["--rounds", str(rounds), "--memory", self.memory]
        for name, value, usual in (
            ("--engine", self.backend, "auto"),
            ("--device", self.device, "cpu"),
            ("--numa", self.numa, None),
        ):
            if value != usual:
                words += [name, str(value)]
        if self.tensor_bytes is not None:
            words += ["--tensor", size_text(self.tensor_bytes)]
        if self.fsync is not None:
            words += ["--fsync", "yes" if self.fsync else "no"]
        return shlex.join(words)


def size_text(nbytes: int) -> str:
    """Return a size exactly, in the largest binary unit that divides it: "256KiB", "4097"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power}{unit}"
    return str(nbytes)
