"""Faults that users of other systems reported, by the numbers of their reports."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tensorspill import checkpoint
from tensorspill.checkpoint import Limits, SavePlanner, Writer
from tensorspill.checkpoint.distributed.group import Ranks
from tensorspill.errors import UnsupportedError
from tests.checkpoint import models
from tests.checkpoint.plans import check_plan, part, plan_of, replicated
from tests.checkpoint.ranks import run
from tests.faults.child import ChildError, start_child

pytestmark = pytest.mark.usefixtures("preloaded")


def test_megatron_1154_a_shard_that_nobody_brings_is_missed(tmp_path):
    def act(rank: int) -> str:
        state = models.state_of(*models.build("fsdp"))
        if rank == 2:
            del state["model"]["down.weight"]
        try:
            checkpoint.save(state, tmp_path)
        except UnsupportedError as error:
            return str(error)
        return ""

    found = run(3, act)
    assert all("'model.down.weight'" in text and "not all of it" in text for text in found)
    assert checkpoint.latest(tmp_path) is None


def test_nemo_rl_2225_ranks_that_never_save_are_not_waited_for(tmp_path):
    def act(rank: int) -> bool:
        savers = dist.new_group([0, 2])
        if rank in (0, 2):
            checkpoint.save({"w": torch.ones(9)}, tmp_path, process_group=savers)
        dist.barrier()
        return checkpoint.latest(tmp_path) is not None

    assert run(4, act) == [True] * 4


def test_verl_2238_later_saves_exchange_nothing_but_digests(tmp_path):
    def act(rank: int) -> int:
        kept = models.build("fsdp")
        state = models.state_of(*kept)
        checkpoint.save(state, tmp_path)
        gathered: list[bytes] = []
        gather = Ranks.gather

        def counted(self: Ranks, data: bytes, timeout: float) -> list[bytes]:
            gathered.append(data)
            return gather(self, data, timeout)

        Ranks.gather = counted  # type: ignore[method-assign]
        for _ in range(3):
            models.losses(*kept, range(1))
            checkpoint.save(models.state_of(*kept), tmp_path)
        return len(gathered)

    assert run(2, act) == [0, 0]


def test_nemo_rl_3312_later_checkpoints_have_later_values(tmp_path):
    def act(rank: int) -> None:
        state: dict[str, Any] = {"w": torch.zeros(3000), "o": 0}
        for step in range(3):
            state["w"].fill_(step)
            state["o"] = step
            checkpoint.save(state, tmp_path / "own", replicated=["*"])
            writer = Writer(tmp_path / "dcp")
            dcp_save(state, storage_writer=writer, planner=SavePlanner(replicated=["*"]))

    run(2, act)
    for way in ("own", "dcp"):
        for step in range(3):
            state: dict[str, Any] = {"w": torch.zeros(3000), "o": -1}
            checkpoint.load(state, tmp_path / way / f"step-{step:08d}")
            assert state["o"] == step
            assert bool((state["w"] == step).all())


def test_nvrx_376_an_optimizer_that_steps_meanwhile_is_not_torn(tmp_path):
    values = [torch.full((1 << 18,), 0.0) for _ in range(16)]
    for step in range(1, 6):
        saving = checkpoint.async_save({"v": values}, tmp_path)
        while not saving.done():
            for value in values:
                value.add_(1)
        loaded = {"v": [torch.zeros(1 << 18) for _ in values]}
        checkpoint.load(loaded, saving.result().path)
        assert len({float(number) for value in loaded["v"] for number in value[::4096]}) == 1
        for value in values:
            value.fill_(step)


def test_nvrx_359_what_was_saved_is_there_when_the_process_dies(tmp_path):
    def act() -> None:
        checkpoint.save({"w": torch.full((1 << 20,), 5.0)}, tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ChildError):
        start_child(act).result()
    state = {"w": torch.zeros(1 << 20)}
    checkpoint.load(state, tmp_path)
    assert bool((state["w"] == 5).all())


def test_pytorch_144657_staging_on_a_cpu_is_a_copy(tmp_path):
    state = {"w": torch.zeros(1 << 20)}
    staged = Writer(tmp_path).stage(state)
    state["w"].fill_(1)
    assert not staged["w"].any()


def test_pytorch_120356_tensors_of_each_rank_are_kept_by_their_names(tmp_path):
    def act(rank: int) -> None:
        state = {f"mine.{rank}": torch.full((100,), float(rank)), "same": torch.full((9,), rank)}
        checkpoint.save(state, tmp_path)

    run(3, act)
    state = {f"mine.{rank}": torch.zeros(100) for rank in range(3)} | {"same": torch.ones(9)}
    state["same"] = state["same"].long()
    checkpoint.load(state, tmp_path)
    for rank in range(3):
        assert bool((state[f"mine.{rank}"] == rank).all())
    # One name is one tensor: that of the lowest rank, whole.
    assert not state["same"].any()


def test_torchtitan_930_a_load_right_after_an_asynchronous_save(tmp_path):
    def act(rank: int) -> bool:
        state = {"w": torch.full((1 << 20,), 3.0)}
        checkpoint.async_save(state, tmp_path, replicated=["*"])
        state = {"w": torch.zeros(1 << 20)}
        checkpoint.load(state, tmp_path)
        return bool((state["w"] == 3).all())

    assert run(2, act) == [True, True]


def test_lightning_20953_the_latest_checkpoint_is_whole_while_the_next_is_written(tmp_path):
    checkpoint.save({"w": torch.zeros(4 << 20)}, tmp_path, keep=1)
    child = start_child(lambda: _save_for_ever(tmp_path))
    try:
        for _ in range(30):
            # Whoever loads meanwhile finds one that is whole; it may be removed while it is read.
            state = {"w": torch.full((4 << 20,), -1.0)}
            try:
                checkpoint.load(state, tmp_path)
            except OSError:
                continue
            assert bool((state["w"] == state["w"][0]).all())
            assert state["w"][0] >= 0
    finally:
        child.kill()


def _save_for_ever(folder: Path) -> None:
    number = 1
    while True:
        checkpoint.save({"w": torch.full((4 << 20,), float(number))}, folder, keep=2)
        number += 1


def test_deepspeed_8500_what_can_be_saved_can_be_loaded(tmp_path):
    with pytest.raises(UnsupportedError, match="could be saved but not loaded"):
        checkpoint.save({"args": Namespace()}, tmp_path)
    state: dict[str, Any] = {"args": vars(Namespace())}
    checkpoint.save(state, tmp_path)
    checkpoint.load(state, tmp_path)


class Namespace:
    """An object of a class of the user's."""

    def __init__(self) -> None:
        self.lr = 0.1


@pytest.mark.thorough
def test_deepspeed_2898_another_number_of_ranks(tmp_path):
    def save(rank: int) -> None:
        state = models.state_of(*models.build("fsdp"))
        models.fill(state)
        checkpoint.save(state, tmp_path)

    def load(rank: int) -> None:
        state = models.state_of(*models.build("fsdp"))
        models.poison(state)
        checkpoint.load(state, tmp_path)
        models.check(state, "on three")

    run(4, save)
    run(3, load)


def test_orbax_2165_many_ranks_write_few_large_pieces():
    size = 64
    held = [replicated(f"t{i}", (1024, 256), tuple(range(size))) for i in range(40)]
    parts = [held] * size
    plan = plan_of(parts)
    check_plan(plan, parts)
    pieces = [box.numel * 4 for rank in range(size) for _, _, box in plan.writes_of(rank)]
    # Not more than a whole tensor each, where tensors are as small as the smallest piece.
    assert len(pieces) == len(held)
    plan = plan_of([[part("one", (1 << 16, 256), ranks=tuple(range(size)))]] * size)
    pieces = [box.numel * 4 for rank in range(size) for _, _, box in plan.writes_of(rank)]
    assert min(pieces) >= Limits().min_chunk
