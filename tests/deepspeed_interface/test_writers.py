"""DeepSpeed's choice of checkpoint writers: its results wherever they are right, and right ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from tensorspill.deepspeed import DataParallelWriterConfig, DataParallelWriterFactory
from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.placement import Placement

Info = Any


def pure_dp(rank: int, world: int, machines: int, sockets: int = 2) -> Info:
    return SimpleNamespace(
        global_world_size=world,
        global_rank=rank,
        local_rank=rank % max(1, world // machines),
        pure_dp=True,
        mpu_info=None,
        ep_info=None,
        num_machines=machines,
        machine_rank=rank // max(1, world // machines),
        num_sockets=machines * sockets,
    )


def grid(rank: int, tp: int, pp: int, dp: int, machines: int) -> Info:
    """A rank of tensor, data and pipeline parallelism, the first changing fastest."""
    place_in_dp = rank // tp % dp
    peers = [rank + (i - place_in_dp) * tp for i in range(dp)]
    info = pure_dp(rank, tp * pp * dp, machines)
    info.pure_dp = False
    info.mpu_info = SimpleNamespace(dp_peer_ranks=peers, dp_rank=place_in_dp, dp_world_size=dp)
    return info


def shares(infos: list[Info], unit: str | None, stage: int = 0) -> list[tuple[int, int] | None]:
    found = [DataParallelWriterFactory(info, unit).create_config(stage, False) for info in infos]
    return [None if config is None else (config.rank, config.world_size) for config in found]


def test_pure_data_parallel() -> None:
    infos = [pure_dp(rank, 16, 2) for rank in range(16)]
    assert shares(infos, "REPLICA") == [(rank, 16) for rank in range(16)]
    every = 16 * [None]
    sockets: list[Any] = list(every)
    for i in range(4):
        sockets[4 * i] = (i, 4)
    assert shares(infos, "SOCKET") == sockets
    machines: list[Any] = list(every)
    machines[0], machines[8] = (0, 2), (1, 2)
    assert shares(infos, "MACHINE") == machines
    first: list[Any] = list(every)
    first[0] = (0, 1)
    assert shares(infos, None) == first


@pytest.mark.parametrize("unit", ["REPLICA", "SOCKET", "MACHINE", None])
@pytest.mark.parametrize(("tp", "pp", "dp", "machines"), [(8, 1, 4, 4), (2, 2, 4, 2), (8, 2, 3, 6)])
def test_every_slice_is_written_once(
    unit: str | None, tp: int, pp: int, dp: int, machines: int
) -> None:
    """Seen: writers 0, 2, 4 … of n; an index twice; assertions."""
    world = tp * pp * dp
    infos = [grid(rank, tp, pp, dp, machines) for rank in range(world)]
    found = shares(infos, unit)
    slices: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for info, share in zip(infos, found, strict=True):
        writers = slices.setdefault(tuple(info.mpu_info.dp_peer_ranks), [])
        writers += [] if share is None else [share]
    assert len(slices) == tp * pp
    for writers in slices.values():
        count = writers[0][1]
        assert sorted(writers) == [(i, count) for i in range(count)]


def test_stages() -> None:
    """Seen at stages 1 and 2: who does not write becomes writer 0 of 1."""
    infos = [pure_dp(rank, 8, 1) for rank in range(8)]
    for stage in (0, 1, 2):
        assert shares(infos, "MACHINE", stage) == [(0, 1), *7 * [None]]
    assert shares(infos, "MACHINE", 3) == 8 * [(0, 1)]


@pytest.mark.parametrize("unit", ["REPLICA", "SOCKET", "MACHINE"])
def test_experts(unit: str) -> None:
    """Seen: NameError with EP > 1 and SOCKET or MACHINE."""
    for expert in range(4):
        peers = list(range(expert, 16, 4))
        found = []
        for rank in peers:
            info = pure_dp(rank, 16, 2)
            info.ep_info = SimpleNamespace(dp_peer_ranks=peers, dp_rank=rank // 4)
            config = DataParallelWriterFactory(info, unit).create_config(0, True)
            found += [] if config is None else [(config.rank, config.world_size)]
        assert found == [(i, len(found)) for i in range(len(found))]
        assert len(found) == {"REPLICA": 4, "SOCKET": 4, "MACHINE": 2}[unit]


def test_uneven_machines_and_a_real_placement() -> None:
    infos = [pure_dp(rank, 10, 4) for rank in range(10)]
    assert [s for s in shares(infos, "MACHINE") if s] == [(i, 4) for i in range(4)]
    cyclic = Placement.regular(2, 4, order="cyclic")
    found = [
        DataParallelWriterFactory(pure_dp(rank, 8, 2), "MACHINE", cyclic).create_config(0, False)
        for rank in range(8)
    ]
    assert [config and config.rank for config in found] == [0, 1, *6 * [None]]


def test_fields_and_misuse() -> None:
    config = DataParallelWriterFactory(pure_dp(3, 4, 1), "REPLICA").create_config(0, False)
    assert config == DataParallelWriterConfig(4, 3, 3, 3, True)
    with pytest.raises(UnsupportedError, match="CLUSTER"):
        DataParallelWriterFactory(pure_dp(3, 4, 1), "CLUSTER")
