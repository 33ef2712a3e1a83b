"""Ranks as forked children of this process, which has torch loaded and kernels compiled.

The store is a process of its own, as torchrun's agent is: it outlives every rank. It is not this
process, since forking beside a server's threads may copy a lock that one of them holds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.faults.child import Child, ChildError, start_child

__all__ = ["Job", "connect", "job", "run", "store_server", "wait_for", "written"]

_SECONDS = 60
#: After which a rank counts as hung; a busy machine must not fail a test.
_HANGS = 300


@contextmanager
def store_server() -> Iterator[tuple[int, Child]]:
    """Run a store; yields its port and process."""
    reading, writing = os.pipe()

    def serve() -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(0.2)

    parent = os.getpid()
    server = start_child(serve)
    try:
        port = int(os.read(reading, 20))
        yield port, server
    finally:
        os.close(reading)
        os.close(writing)
        server.kill()


class Job:
    """Ranks that were started.

    Attributes
    ----------
    children : list of Child
        By rank.
    """

    def __init__(self, children: list[Child]) -> None:
        self.children = children

    def results(self, timeout: float = _HANGS) -> list[Any]:
        """Wait for all ranks and return what each returned; the errors of all are raised as one."""
        found, errors = [], []
        for rank, child in enumerate(self.children):
            try:
                found.append(child.result(timeout))
            except ChildError as error:
                errors.append(f"rank {rank}: {error}")
        if errors:
            raise ChildError("\n".join(errors))
        return found


@contextmanager
def job(
    size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 30
) -> Iterator[Job]:
    """Start `size` ranks that call ``function(rank, *arguments)`` in a gloo group.

    Parameters
    ----------
    seconds : float
        The group's timeout.
    """
    with store_server() as (port, _):
        children = []
        for rank in range(size):

            def work(rank: int = rank) -> Any:
                with group(rank, size, port, seconds):
                    return function(rank, *arguments)

            children.append(start_child(work))
        yield Job(children)


def run(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ranks to their end; an error of any is raised here."""
    with job(size, function, *arguments) as ranks:
        return ranks.results()


def connect(port: int) -> Any:
    """Return a connection to a store."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


@contextmanager
def group(rank: int, size: int, port: int, seconds: float) -> Iterator[None]:
    """Initialise torch.distributed meanwhile."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = connect(port)
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
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        head.pop("__metadata__", None)
        found[path.name] = {
            name: item["data_offsets"][1] - item["data_offsets"][0]
            for name, item in head.items()
            if not name.startswith("object:")
        }
    return found
