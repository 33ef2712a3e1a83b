"""What counts as replicated, in real groups: and that nothing else is ever cut."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorspill import checkpoint
from tensorspill.checkpoint import Limits
from tensorspill.checkpoint.distributed.replication import Replicas
from tensorspill.errors import UnsupportedError
from tests.checkpoint.ranks import run, written

pytestmark = pytest.mark.usefixtures("preloaded")

LIMITS = Limits(min_chunk=64)


def writers(folder: Path, name: str) -> int:
    """Return how many files have a part of a tensor."""
    files = written(checkpoint.latest(folder) or "")
    return sum(any(n.split("[")[0] == name for n in file) for file in files.values())


def test_ddp_parameters_and_their_optimizers_state(tmp_path):
    def act(rank: int) -> None:
        last = nn.Linear(48, 48)
        last.register_buffer("extra", torch.zeros(48, 48))
        model = nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), last)
        ignored = "0.weight"
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [ignored])
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        ddp(torch.randn(4, 48)).sum().backward()
        optimizer.step()
        other = nn.Linear(48, 48)
        state = {"m": ddp, "o": optimizer, "other": other, "copy": last.weight.detach().clone()}
        checkpoint.save(state, tmp_path, limits=LIMITS)

    run(2, act)
    # Two parameters are cut at least, one is not at all.
    names = ["m.module.2.weight", "m.module.1.weight", "o.state.4.exp_avg", "o.state.5.exp_avg_sq"]
    assert sum(writers(tmp_path, name) for name in names) >= len(names)
    files = written(checkpoint.latest(tmp_path) or "")
    second = files["rank00001-0.safetensors"]
    assert any(name.startswith("m.module") for name in second)
    assert any(name.startswith("o.state") for name in second)
    for alone in ("m.module.0.weight", "m.module.1.running_mean", "m.module.2.extra", "other."):
        assert not any(name.startswith(alone) for name in second), alone
    assert not any(name.startswith(("copy", "o.state.0.")) for name in second)


def test_a_models_batchnorm_statistics_are_one_ranks(tmp_path):
    def act(rank: int) -> dict[str, torch.Tensor]:
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(12, 96), nn.BatchNorm1d(96)))
        torch.manual_seed(rank)
        ddp(torch.randn(16, 12))
        checkpoint.save({"m": ddp}, tmp_path, limits=LIMITS)
        return {name: value.clone() for name, value in ddp.state_dict().items()}

    states = run(3, act)
    assert not torch.equal(states[0]["module.1.running_mean"], states[1]["module.1.running_mean"])
    loaded = {"m": {name: torch.zeros_like(value) for name, value in states[0].items()}}
    checkpoint.load(loaded, tmp_path)
    for name, value in states[0].items():
        assert torch.equal(loaded["m"][name], value), name


def test_what_is_vouched_for_is_cut_and_can_be_compared(tmp_path):
    def act(rank: int) -> str:
        state = {"w": torch.arange(4096.0), "v": torch.full((4096,), float(rank))}
        checkpoint.save(state, tmp_path, replicated=["w"], compare=True, limits=LIMITS)
        try:
            checkpoint.save(state, tmp_path, replicated=["*"], compare=True, limits=LIMITS)
        except UnsupportedError as error:
            return str(error)
        return ""

    found = run(3, act)
    # Rank 0 has enough to do with what nobody vouches for.
    assert writers(tmp_path, "w") == 2
    assert writers(tmp_path, "v") == 1
    assert found == [found[0]] * 3
    assert "'v' differs between ranks 0 and 1" in found[0]


def test_state_that_each_rank_keeps_for_itself(tmp_path):
    def act(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        state = {f"rng.{rank}": torch.get_rng_state(), f"seed.{rank}": rank}
        checkpoint.save(state, tmp_path)
        torch.rand(10)
        mine = {f"rng.{rank}": torch.get_rng_state(), f"seed.{rank}": -1}
        checkpoint.load(mine, tmp_path)
        return {"rng": mine[f"rng.{rank}"], "seed": mine[f"seed.{rank}"]}

    for rank, found in enumerate(run(4, act)):
        torch.manual_seed(rank)
        assert torch.equal(found["rng"], torch.get_rng_state())
        assert found["seed"] == rank


def test_objects_of_one_dictionary_come_from_one_rank(tmp_path):
    def act(rank: int) -> None:
        checkpoint.save({"d": {f"k{i}": (rank, i) for i in range(5)}}, tmp_path)

    run(3, act)
    state: dict[str, Any] = {"d": {f"k{i}": None for i in range(5)}}
    checkpoint.load(state, tmp_path)
    assert state["d"] == {f"k{i}": (0, i) for i in range(5)}


@pytest.mark.thorough
def test_ranks_whose_optimizers_hold_different_parameters_are_not_mixed(tmp_path):
    """As ZeRO's: state number 0 is of another parameter on each rank."""

    def act(rank: int) -> torch.Tensor:
        ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(32, 32) for _ in range(2))))
        optimizer = torch.optim.AdamW([ddp.module[rank].weight])
        ddp(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        state = {"o": optimizer.state_dict(), f"own.{rank}": optimizer.state_dict()["state"]}
        checkpoint.save(state, tmp_path, limits=LIMITS)
        found: torch.Tensor = optimizer.state_dict()["state"][0]["exp_avg"]
        return found

    moments = run(2, act)
    loaded = {"o": {"state": {0: {"exp_avg": torch.zeros(32, 32)}}}}
    checkpoint.load(loaded, tmp_path)
    assert torch.equal(loaded["o"]["state"][0]["exp_avg"], moments[0])
    own = {f"own.{rank}": {0: {"exp_avg": torch.zeros(32, 32)}} for rank in range(2)}
    checkpoint.load(own, tmp_path)
    for rank, expected in enumerate(moments):
        assert torch.equal(own[f"own.{rank}"][0]["exp_avg"], expected)


def test_a_group_that_changes_between_saves_gets_plans_of_its_own(tmp_path):
    def act(rank: int) -> list[tuple[bool, tuple[int, ...]]]:
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2, 3])]
        state = {"w": torch.arange(4096.0)}
        found = []
        for turn in range(3):
            for number, group in ((0, None), (1, pairs[0]), (2, pairs[1])):
                if group is None or rank in dist.get_process_group_ranks(group):
                    record = checkpoint.save(
                        state,
                        tmp_path / str(number),
                        process_group=group,
                        replicated=["*"],
                        limits=LIMITS,
                    )
                    found.append((record.planned, record.shares))
                    assert record.planned == (turn == 0)
        return found

    run(4, act)
    for number, size in ((0, 4), (1, 2), (2, 3)):
        assert writers(tmp_path / str(number), "w") == size
        state = {"w": torch.zeros(4096)}
        checkpoint.load(state, tmp_path / str(number))
        assert torch.equal(state["w"], torch.arange(4096.0))


def test_threads_that_fill_tuples_meanwhile_go_on():
    """A look that held each of Python's objects for a moment made them fail, with SystemError."""

    class Own(torch.optim.SGD):
        pass

    errors: list[BaseException] = []
    ended = threading.Event()

    def fill() -> None:
        while not ended.is_set():
            try:
                tuple(str(number) for number in range(20))
            except SystemError as error:
                errors.append(error)

    optimizer = Own(nn.Linear(2, 2).parameters(), lr=1.0)
    replicas = Replicas((), range(2))
    filling = threading.Thread(target=fill)
    filling.start()
    for _ in range(8):
        replicas.look(everywhere=True)
    ended.set()
    filling.join()
    assert errors == []
    assert optimizer in replicas._optimizers
