"""The table that every rank has in equal form: where each rank is and what it writes through."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.nesting import Level
from tensorspill.topology.ranks.placement import Placement, Unit, streams
from tensorspill.topology.solver.arrays import Integers

__all__ = ["RankRecord", "RankTable"]


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Where a rank is. Devices are named within their host; None is unknown.

    Attributes
    ----------
    rank, local_rank : int
        Its number in the job, and on its host.
    host : str
        Name of its machine.
    gpu, socket, switch, nic, nvme : str or None
        Its GPU (PCI address or UUID) and what is next to it.
    storage : str or None
        What it writes to; ranks of one host with the same name share it. None is the machine's
        drives, all together.
    stream_mbps, switch_mbps, nic_mbps, storage_mbps : int or None
        Rates, in MB/s, where they are known.
    """

    rank: int
    host: str
    local_rank: int
    gpu: str | None = None
    socket: str | None = None
    switch: str | None = None
    nic: str | None = None
    nvme: str | None = None
    storage: str | None = None
    stream_mbps: int | None = None
    switch_mbps: int | None = None
    nic_mbps: int | None = None
    storage_mbps: int | None = None

    @classmethod
    def parse(cls, value: Any, where: str) -> RankRecord:
        """Return a record from its JSON form; `where` is named in errors."""
        if not isinstance(value, Mapping):
            raise UnsupportedError(f"{where}: {value!r} is no record of a rank")
        known = {field.name: field.type for field in fields(cls)}
        if unknown := sorted(set(map(str, value)) - set(known)):
            raise UnsupportedError(f"{where}: a rank has no field {unknown[0]!r}")
        for name in ("rank", "host", "local_rank"):
            if name not in value:
                raise UnsupportedError(f"{where}: a rank lacks {name!r}: {dict(value)!r:.200}")
        for name, item in value.items():
            kind = int if "int" in str(known[name]) else str
            optional = "None" in str(known[name])
            if not (item is None and optional) and type(item) is not kind:
                raise UnsupportedError(f"{where}: {name} is {item!r}, not {kind.__name__}")
        return cls(**value)


@dataclass(frozen=True)
class RankTable:
    """The records of all ranks, in their order.

    Raises
    ------
    UnsupportedError
        A rank is missing, occurs twice or has a rate below 1, or two ranks have one GPU.
    """

    records: tuple[RankRecord, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", tuple(sorted(self.records, key=lambda r: r.rank)))
        if not self.records:
            raise UnsupportedError("A table without ranks")
        for number, record in enumerate(self.records):
            if record.rank > number:
                raise UnsupportedError(f"Rank {number} is missing in the table")
            if record.rank < number:
                raise UnsupportedError(f"Rank {record.rank} occurs twice in the table")
        self._check_devices()

    def _check_devices(self) -> None:
        seen: dict[tuple[str, str], int] = {}
        for record in self.records:
            for name in ("stream_mbps", "switch_mbps", "nic_mbps", "storage_mbps"):
                if (rate := getattr(record, name)) is not None and rate < 1:
                    raise UnsupportedError(f"Rank {record.rank} has {name} {rate}; 1 is the least")
            if record.gpu is None:
                continue
            other = seen.setdefault((record.host, record.gpu), record.rank)
            if other != record.rank:
                raise UnsupportedError(
                    f"Ranks {other} and {record.rank} are both on GPU {record.gpu} of {record.host}"
                )

    @cached_property
    def digest(self) -> str:
        """128 bits over the table, as hexadecimal digits."""
        return hashlib.blake2b(self.dump().encode(), digest_size=16).hexdigest()

    def dump(self) -> str:
        """Return the table as JSON; fields that are unknown are left out."""
        short = [{k: v for k, v in asdict(r).items() if v is not None} for r in self.records]
        return json.dumps(short, sort_keys=True, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str, where: str = "the table") -> RankTable:
        """Return a table from JSON: a list of records, or of host names for ranks in order."""
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UnsupportedError(f"{where} is no JSON: {error}") from error
        if not isinstance(value, list):
            raise UnsupportedError(f"{where} is no list of ranks")
        if value and all(isinstance(item, str) for item in value):
            return cls(tuple(_in_order(value)))
        return cls(tuple(RankRecord.parse(item, where) for item in value))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RankTable:
        """Return the table in a file, in the form that `parse` takes."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise BrokenError.from_oserror(error, "Can't read the ranks", path=path) from error
        except UnicodeDecodeError as error:
            raise UnsupportedError("The table of ranks is no text", path=path) from error
        return cls.parse(text, os.fspath(path))

    def placement(
        self, *, storage: str = "machine", capacities: Capacities | None = None
    ) -> Placement:
        """Return where the ranks are, for the planner.

        Parameters
        ----------
        storage : str
            ``"machine"``: each rank writes to its `RankRecord.storage`; ``"shared"``: through its
            NIC.
        capacities : Capacities, optional
            Rates where records give none.
        """
        if storage not in ("machine", "shared"):
            raise UnsupportedError(f"Storage {storage!r} is neither 'machine' nor 'shared'")
        usual = capacities or Capacities()
        where: dict[Unit, Integers] = {}
        names: dict[Unit, Sequence[str]] = {}
        where[Unit.MACHINE], names[Unit.MACHINE] = _numbered(r.host for r in self.records)
        for unit, field in _FIELDS.items():
            where[unit], names[unit] = _numbered(
                _within(r, getattr(r, field)) for r in self.records
            )
        stream = [r.stream_mbps or usual.stream for r in self.records]
        levels = [streams(len(self.records), stream)]
        if usual.switch is not None:
            devices = where[Unit.GPU_SWITCH], names[Unit.GPU_SWITCH]
            levels.append(self._level("gpu-switch", *devices, "switch_mbps", usual.switch))
        if storage == "shared" and usual.nic is not None:
            levels.append(
                self._level("nic", where[Unit.NIC], names[Unit.NIC], "nic_mbps", usual.nic)
            )
        elif storage == "machine" and usual.storage is not None:
            group = _numbered(_within(r, r.storage or "drives") for r in self.records)
            levels.append(self._level("storage", *group, "storage_mbps", usual.storage))
        return Placement.of(where, names, levels, usual.filesystem)

    def _level(
        self, kind: str, of: Integers, names: Sequence[str], field: str, usual: int
    ) -> Level:
        """Return a level; a device's rate is the least that a rank gives for it."""
        rate = np.full(len(names), np.iinfo(np.int64).max)
        given = [getattr(r, field) for r in self.records]
        for device, value in zip(of.tolist(), given, strict=True):
            if device >= 0 and value is not None:
                rate[device] = min(int(rate[device]), value)
        rate[rate == np.iinfo(np.int64).max] = usual
        return Level(kind, of, rate, names)


_FIELDS = {
    Unit.SOCKET: "socket",
    Unit.GPU_SWITCH: "switch",
    Unit.NIC: "nic",
    Unit.NVME: "nvme",
}


def _within(record: RankRecord, device: str | None) -> str | None:
    return None if device is None else f"{record.host}/{device}"


def _numbered(names: Iterable[str | None]) -> tuple[Integers, list[str]]:
    """Return (number of each name in the order of first occurrence, the names)."""
    seen: dict[str, int] = {}
    number = [-1 if name is None else seen.setdefault(name, len(seen)) for name in names]
    return np.array(number, np.int64), list(seen)


def _in_order(hosts: Sequence[str]) -> Iterable[RankRecord]:
    """Return records for ranks whose hosts are listed in their order."""
    count: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        local = count.get(host, 0)
        count[host] = local + 1
        yield RankRecord(rank=rank, host=host, local_rank=local)
