"""The record of this rank, and the one exchange by which every rank gets the records of all."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tensorspill.errors import UnsupportedError
from tensorspill.topology.affinity import Affinity, affinities
from tensorspill.topology.discovery import device_of, discover
from tensorspill.topology.machine import Drive, Machine
from tensorspill.topology.process import Process, current_process, visible_gpus
from tensorspill.topology.ranks.launch import LaunchedRank, launched
from tensorspill.topology.ranks.rank_table import RankRecord, RankTable

__all__ = ["gather_ranks", "this_rank"]

#: Bytes of each rank's record on the wire; all are of equal size, so that one exchange is enough.
_WIRE = 1024


def this_rank(
    machine: Machine | None = None,
    launch: LaunchedRank | None = None,
    process: Process | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    measure: bool = False,
) -> RankRecord:
    """Return this process's record.

    Parameters
    ----------
    machine, launch, process
        What to go by; by default what is discovered here.
    folder : path-like, optional
        Where this rank will write; by default all NVMe drives of the machine are taken together.
    measure : bool
        Measure how fast `folder` can be written, unless that was done before.

    Raises
    ------
    UnsupportedError
        The launcher's variables contradict each other, or no GPU is left for this rank.
    """
    machine = machine or discover()
    launch = launch or launched()
    process = process or current_process()
    near = _near(machine, launch, process)
    host = machine.hostname or socket.gethostname()
    nics = {nic.name: nic.mbps for nic in machine.nics}
    switch = None
    if near.gpu is not None:
        switch = machine.switch_of(machine.gpu(near.gpu))
    storage, rate = _storage(machine, folder, measure)
    links = {bridge.name: bridge.link_mbps for bridge in machine.bridges}
    return RankRecord(
        rank=launch.rank,
        host=host,
        local_rank=launch.local_rank,
        gpu=near.mig or near.gpu,
        socket=None if near.socket is None else f"socket{near.socket}",
        switch=switch,
        nic=near.nic,
        nvme=near.drive,
        switch_mbps=links.get(switch) or None if switch else None,
        nic_mbps=nics.get(near.nic) or None if near.nic else None,
        storage=storage,
        storage_mbps=rate,
    )


def _near(machine: Machine, launch: LaunchedRank, process: Process) -> Affinity:
    """Return the affinity of this rank among those of its node, so that ranks share devices out."""
    devices = list(visible_gpus(machine, process))
    if not devices:
        count = max(launch.local_world or 1, launch.local_rank + 1)
        return affinities(machine, [None] * count, process)[launch.local_rank]
    if len(devices) == 1:
        return affinities(machine, devices, process)[0]
    if launch.local_rank >= len(devices):
        raise UnsupportedError(
            f"Rank {launch.rank} has no device: it is number {launch.local_rank} on its node, and "
            f"{len(devices)} GPUs are visible"
        )
    return affinities(machine, devices, process)[launch.local_rank]


def _storage(
    machine: Machine, folder: str | os.PathLike[str] | None, measure: bool
) -> tuple[str | None, int | None]:
    """Return what a folder is on and its rate."""
    if folder is None:
        return None, _together([drive for drive in machine.drives if drive.kind == "nvme"])
    where = device_of(folder)
    if measure:
        from tensorspill.topology.ranks.probe import measured_write_mbps

        return where.device or where.mount, measured_write_mbps(folder)
    drives = [drive for drive in machine.drives if drive.name in where.drives]
    return where.device or where.mount, _together(drives)


def _together(drives: Sequence[Drive]) -> int | None:
    """Return what drives write together, or None if that is unknown."""
    rates = [drive.write_mbps for drive in drives]
    known = [rate for rate in rates if rate]
    return sum(known) if known and len(known) == len(rates) else None


def gather_ranks(record: RankRecord | None = None, group: Any = None) -> RankTable:
    """Exchange records with all ranks, by one all-gather; every rank gets the same table.

    Without an initialised process group it is the table of this rank alone. Call it once, at
    initialisation: plans made from the table need no communication.

    Parameters
    ----------
    record : RankRecord, optional
        This rank's; by default `this_rank`.
    group : torch.distributed.ProcessGroup, optional
        All ranks of the job; by default the default group.

    Raises
    ------
    UnsupportedError
        A record is too long, or the records do not form a table. In the latter case every rank
        raises the same.
    """
    import torch
    import torch.distributed as dist

    record = record or this_rank()
    if not (dist.is_available() and dist.is_initialized()):
        return RankTable((record,))
    wire = _encode(record)
    device = _device(group)
    mine = torch.frombuffer(bytearray(wire), dtype=torch.uint8).to(device)
    world = dist.get_world_size(group)
    every = [torch.empty(_WIRE, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(every, mine, group=group)
    return RankTable(tuple(_decode(bytes(part.cpu().tolist())) for part in every))


def _device(group: Any) -> Any:
    """Return where tensors have to be that the group's backend can exchange."""
    import torch
    import torch.distributed as dist

    if "gloo" in dist.get_backend(group) or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _encode(record: RankRecord) -> bytes:
    short = {key: value for key, value in asdict(record).items() if value is not None}
    wire = json.dumps(short, separators=(",", ":")).encode()
    if len(wire) > _WIRE:
        raise UnsupportedError(
            f"The record of rank {record.rank} takes {len(wire)} bytes; {_WIRE} are the most"
        )
    return wire.ljust(_WIRE, b" ")


def _decode(wire: bytes) -> RankRecord:
    return RankRecord.parse(json.loads(wire), "the exchange of ranks")
