"""Ranks from launchers' variables, from files, and by one all-gather."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.topology.machines import machine
from tensorspill.topology.process import Process
from tensorspill.topology.ranks.gathering import this_rank
from tensorspill.topology.ranks.launch import LaunchedRank, launched
from tensorspill.topology.ranks.placement import Unit
from tensorspill.topology.ranks.rank_table import RankRecord, RankTable
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.slices import Slice

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
}
SLURM = {
    "SLURM_PROCID": "11",
    "SLURM_NTASKS": "20",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "11",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
DEEPSPEED = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_SIZE": "8",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
}
RAY = {
    "RAY_JOB_ID": "01000000",
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "NODE_RANK": "1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, LaunchedRank(11, 16, 3, 8, 1, "torchrun")),
        (SLURM, LaunchedRank(11, 20, 3, 8, 1, "slurm")),
        ({**SLURM, "SLURM_NODEID": "2", "SLURM_PROCID": "19"},
         LaunchedRank(19, 20, 3, 4, 2, "slurm")),
        (OPENMPI, LaunchedRank(11, 16, 3, 8, None, "openmpi")),
        (DEEPSPEED, LaunchedRank(11, 16, 3, 8, 1, "deepspeed")),
        (RAY, LaunchedRank(11, 16, 3, 8, 1, "ray")),
        ({}, LaunchedRank(0, 1, 0, 1, 0, "none")),
        # torchrun's agents are started by Slurm, one for each node: what it counts are agents.
        ({**SLURM, **TORCHRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
         LaunchedRank(11, 16, 3, 8, 1, "torchrun")),
        # A script that sets RANK and WORLD_SIZE from Slurm's.
        ({**SLURM, "RANK": "11", "WORLD_SIZE": "20"}, LaunchedRank(11, 20, 3, 8, 1, "slurm")),
        ({**OPENMPI, "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3"},
         LaunchedRank(11, 16, 3, None, None, "environment")),
    ],
)  # fmt: skip
def test_launchers(environ, expected) -> None:
    assert launched(environ) == expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**TORCHRUN, "RANK": "16"}, "rank 16 of 16"),
        ({**TORCHRUN, "RANK": "-1"}, "rank -1 of 16"),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, "local rank 8 of 8"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE='many' is no number"),
        ({k: v for k, v in TORCHRUN.items() if k != "WORLD_SIZE"}, "not WORLD_SIZE"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"}, "not SLURM_LOCALID"),
        ({**SLURM, "SLURM_NODEID": "20"}, "rank 11 is on node 20"),
        (
            {**OPENMPI, "RANK": "10", "WORLD_SIZE": "16", "LOCAL_RANK": "3"},
            "RANK=10 and OMPI_COMM_WORLD_RANK=11 contradict",
        ),
        (
            {**SLURM, "RANK": "10", "WORLD_SIZE": "20", "LOCAL_RANK": "3"},
            "RANK=10 and SLURM_PROCID=11 contradict",
        ),
    ],
)
def test_contradictory_variables_are_named(environ, named) -> None:
    with pytest.raises(UnsupportedError, match=named):
        launched(environ)


def record(rank, host="a", **fields) -> RankRecord:
    return RankRecord(rank=rank, host=host, local_rank=rank, **fields)


def test_table_round_trip_and_order() -> None:
    records = [
        record(2, gpu="0000:01:00.0"),
        record(0, "b"),
        record(1, nic="mlx5_0", nic_mbps=25_000),
    ]
    table = RankTable(tuple(records))
    assert [r.rank for r in table.records] == [0, 1, 2]
    assert RankTable.parse(table.dump()) == table
    assert RankTable(tuple(records[::-1])).digest == table.digest


def test_table_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps(["a", "a", "b", "a"]))
    table = RankTable.read(file)
    assert [(r.host, r.local_rank) for r in table.records] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("a", 2),
    ]
    placement = table.placement()
    assert placement.where[Unit.MACHINE].tolist() == [0, 0, 1, 0]
    plan = plan_writers([Slice("x", range(4), 10**9)], placement)
    assert plan.gap < 1e-4


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is no JSON"),
        ("[", "is no JSON"),
        ("{}", "no list of ranks"),
        ("[]", "without ranks"),
        ('[{"rank": 0}]', "lacks 'host'"),
        ('[{"rank": 0, "host": "a", "local_rank": 0, "colour": 1}]', "no field 'colour'"),
        ('[{"rank": "0", "host": "a", "local_rank": 0}]', "rank is '0', not int"),
        ('[{"rank": true, "host": "a", "local_rank": 0}]', "rank is True, not int"),
        ('[{"rank": 1, "host": "a", "local_rank": 0}]', "Rank 0 is missing"),
        ('["a", 1]', "no record of a rank"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "ranks.json"
    file.write_text(text)
    with pytest.raises(UnsupportedError, match=named):
        RankTable.read(file)


def test_table_checks_ranks_and_devices(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Rank 1 occurs twice"):
        RankTable((record(0), record(1), record(1)))
    with pytest.raises(UnsupportedError, match=r"Ranks 0 and 2 are both on GPU g1 of a"):
        RankTable((record(0, gpu="g1"), record(1, "b", gpu="g1"), record(2, gpu="g1")))
    with pytest.raises(UnsupportedError, match="Rank 1 has nic_mbps 0"):
        RankTable((record(0), record(1, nic_mbps=0)))
    with pytest.raises(BrokenError, match=r"Can't read the ranks.*missing"):
        RankTable.read(tmp_path / "missing.json")


def test_rates_of_records_count() -> None:
    rates = {0: 1000, 1: 3000}
    records = [record(r, "ab"[r // 2], storage_mbps=rates[r // 2]) for r in range(4)]
    plan = plan_writers([Slice("x", range(4), 4 * 10**9)], RankTable(tuple(records)).placement())
    assert plan.lower_bound == 10**6


WORKER = """
import os, sys
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from tensorspill.topology.ranks.gathering import gather_ranks
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.slices import Slice
dist.init_process_group("gloo")
with CommDebugMode() as counted:
    table = gather_ranks()
world = dist.get_world_size()
with CommDebugMode() as after:
    plan = plan_writers([Slice("x", range(world), 10**8)], table.placement())
hosts = sorted({r.host for r in table.records})
assert (counted.get_total_counts(), after.get_total_counts()) == (1, 0)
out = f"{table.digest} {plan.digest} {len(table.records)} {len(hosts)} {len(plan.writers)}"
open(os.path.join(sys.argv[1], f"rank{dist.get_rank()}"), "w").write(out)
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def outcome(folder: Path, ranks: int) -> list[str]:
    """Return what all ranks found, which is the same on each."""
    found = {(folder / f"rank{rank}").read_text() for rank in range(ranks)}
    assert len(found) == 1
    return found.pop().split()


@pytest.mark.thorough
def test_one_all_gather_gives_every_rank_the_same_table(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    command += [f"--master-port={free_port()}", str(worker), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert outcome(tmp_path, 3)[2:] == ["3", "1", "3"]


@pytest.fixture
def two_hosts():
    """Two network namespaces with an address each and a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("two hosts: needs root, iproute2 and unshare")
    names = [f"ts{os.getpid()}{end}" for end in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [
        f"ip link add {names[0]} netns {names[0]} type veth peer {names[1]} netns {names[1]}"
    ]
    for number, name in enumerate(names):
        inside = f"ip -n {name}"
        commands += [f"{inside} addr add 10.77.0.{number + 1}/24 dev {name}"]
        commands += [f"{inside} link set lo up", f"{inside} link set {name} up"]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"two hosts: {command!r} is not allowed here: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.thorough
def test_two_hosts_under_torchrun(tmp_path: Path, two_hosts) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    agents = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for number, name in enumerate(two_hosts):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += [f"--node-rank={number}", "--nproc-per-node=2", "--master-addr=10.77.0.1"]
        torchrun += ["--master-port=29511", str(worker), str(tmp_path)]
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
        command += [f'hostname host{number} && exec "$@"', "sh", *torchrun]
        own = {**environment, "GLOO_SOCKET_IFNAME": name}
        agents.append(
            subprocess.Popen(command, env=own, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        )
    try:
        errors = [agent.communicate(timeout=120)[1].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], errors
    assert outcome(tmp_path, 4)[2:] == ["4", "2", "4"]


def test_record_of_a_rank_on_a_known_machine(tmp_path: Path) -> None:
    where = machine("dgx-h100")
    records = [
        this_rank(where, LaunchedRank(8 + local, 16, local, 8, 1, "torchrun"), Process())
        for local in range(8)
    ]
    assert [r.rank for r in records] == list(range(8, 16))
    for name in ("gpu", "nic", "nvme", "switch"):
        assert len({getattr(r, name) for r in records}) == 8
    assert [r.socket for r in records] == ["socket0"] * 4 + ["socket1"] * 4
    assert {r.storage_mbps for r in records} == {32_000}
    with pytest.raises(UnsupportedError, match="Rank 16 has no device"):
        this_rank(where, LaunchedRank(16, 17, 8, 9, 1, "torchrun"), Process())


def test_record_names_the_device_of_a_folder(tmp_path: Path) -> None:
    here = this_rank(launch=LaunchedRank(0, 1, 0, 1, 0, "none"), folder=tmp_path)
    assert here.storage
    assert here.host
