"""Ranks as forked children of this process, which has torch loaded and kernels compiled.

The store is this process's, as that of torchrun's agent is: it outlives every rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.child import Child, start_child

__all__ = ["Job", "begin", "run"]

_SECONDS = 60


class Job:
    """Ranks that were started.

    Attributes
    ----------
    children : list of Child
        By rank.
    """

    def __init__(self, children: list[Child]) -> None:
        self.children = children

    def results(self, timeout: float = _SECONDS) -> list[Any]:
        """Wait for all ranks and return what each returned."""
        return [child.result(timeout) for child in self.children]


def begin(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 30) -> Job:
    """Start `size` ranks that call ``function(rank, *arguments)`` in a gloo group.

    Parameters
    ----------
    seconds : float
        The group's timeout.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(size):

        def work(rank: int = rank) -> Any:
            with group(rank, size, store.port, seconds):
                return function(rank, *arguments)

        children.append(start_child(work))
    job = Job(children)
    job.__dict__["store"] = store  # kept until the job is gone
    return job


def run(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ranks to their end; an error of any is raised here."""
    return begin(size, function, *arguments).results()


@contextmanager
def group(rank: int, size: int, port: int, seconds: float) -> Iterator[None]:
    """Initialise torch.distributed meanwhile."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    torch.manual_seed(1234)
    try:
        yield
    finally:
        dist.destroy_process_group()


def wait_for(found: Callable[[], Any], seconds: float = 30) -> Any:
    """Return what `found` returns, once that is true."""
    until = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() > until:
            raise AssertionError("what was waited for did not happen")
        time.sleep(0.005)
    return value


def written(folder: str | Path) -> dict[str, dict[str, int]]:
    """Return {file: {tensor: bytes}} of a checkpoint, from the headers of its files."""
    import json

    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        head.pop("__metadata__", None)
        found[path.name] = {
            name: item["data_offsets"][1] - item["data_offsets"][0] for name, item in head.items()
        }
    return found
