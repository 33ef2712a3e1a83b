"""With torch.distributed.checkpoint's own parts in place of some of ours."""

import io
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from tensorspill import checkpoint
from tensorspill.checkpoint import Limits, Reader, SavePlanner, Staging, Writer
from tensorspill.checkpoint.distributed.group import ranks_of
from tensorspill.errors import CapacityError, NoSpaceError, RankFailedError, UnsupportedError
from tests.checkpoint import models
from tests.checkpoint.ranks import job, run, written
from tests.faults.file_systems import small_file_system

pytestmark = [
    pytest.mark.usefixtures("preloaded"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

LIMITS = Limits(min_chunk=512)

#: Typed loosely, as it does not say what it exports.
dcp: Any = torch.distributed.checkpoint


def ddp_state() -> tuple[Any, dict[str, Any]]:
    model, optimizer = models.build("ddp")
    state = models.state_of(model, optimizer)
    models.fill(state)
    return (model, optimizer), state | {"step": 7, "list": [1, {"a": torch.ones(3)}]}


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    models.poison(state)
    return state | {"step": 0}


def check_loaded(state: dict[str, Any]) -> None:
    assert state["step"] == 7
    models.check({"model": state["model"], "optimizer": state["optimizer"]}, "loaded")


@pytest.mark.parametrize(
    "own",
    [*(pytest.param(each, marks=pytest.mark.thorough) for each in ("planner", "writer")), "both"],
)
def test_each_part_works_without_the_other(tmp_path, own):
    def act(rank: int) -> None:
        _kept, state = ddp_state()
        for step in range(2):
            folder = tmp_path / str(step)
            writer = dcp.FileSystemWriter(folder) if own == "planner" else Writer(folder)
            planner = None if own == "writer" else SavePlanner(limits=LIMITS)
            dcp.save(state, storage_writer=writer, planner=planner)
            reader = dcp.FileSystemReader(folder) if own == "planner" else Reader(folder)
            state = emptied(state)
            dcp.load(state, storage_reader=reader)
            check_loaded(state)

    run(3, act)
    if own != "planner":
        files = written(checkpoint.latest(tmp_path / "1") or "")
        cut = any("[" in name for file in files.values() for name in file)
        assert cut == (own == "both")


def test_a_checkpoint_id_names_the_folder(tmp_path):
    state = {"w": torch.arange(5.0)}
    dcp.save(state, checkpoint_id=tmp_path / "a", storage_writer=Writer())
    state = {"w": torch.zeros(5)}
    dcp.load(state, checkpoint_id=tmp_path / "a", storage_reader=Reader())
    assert torch.equal(state["w"], torch.arange(5.0))
    with pytest.raises(CheckpointException, match="no folder"):
        dcp.save(state, storage_writer=Writer())


def test_plans_are_kept_from_planner_to_planner_and_never_stale(tmp_path):
    def act(rank: int) -> list[bool]:
        from tensorspill.checkpoint import dcp_planner

        made: list[int] = []
        plan_together = vars(dcp_planner)["plan_together"]

        def counted(*arguments: Any) -> Any:
            made.append(1)
            return plan_together(*arguments)

        vars(dcp_planner)["plan_together"] = counted
        _kept, state = ddp_state()
        pair = dist.new_group([0, 1])
        known = []
        for number, group in ((0, None), (1, None), (2, pair), (3, pair), (4, None)):
            if group is not None and rank == 2:
                continue
            if number == 4:
                state["more"] = torch.ones(5)
            made.clear()
            dcp.save(
                state,
                storage_writer=Writer(tmp_path / str(number), process_group=group),
                planner=SavePlanner(limits=LIMITS, process_group=group),
                process_group=group,
            )
            known.append(not made)
        return known

    found = run(3, act)
    assert found == [[False, True, False, True, False]] * 2 + [[False, True, False]]
    for number, size in enumerate((3, 3, 2, 2, 3)):
        assert len(written(checkpoint.latest(tmp_path / str(number)) or "")) == size


def test_a_planner_of_another_group_is_told(tmp_path):
    def act(rank: int) -> str:
        pair = dist.new_group([0, 1])
        ranks_of(None)  # all three, as an earlier save would have
        if rank == 2:
            return ""
        try:
            dcp.save(
                {"w": torch.ones(3)},
                storage_writer=Writer(tmp_path, process_group=pair),
                planner=SavePlanner(),
                process_group=pair,
            )
        except CheckpointException as error:
            return str(error)
        return "saved"

    assert all("same process_group" in text for text in run(3, act)[:2])


def test_without_the_other_ranks(tmp_path):
    def act(rank: int) -> bool:
        state: dict[str, Any] = {"w": torch.full((100,), float(rank)), "rank": rank}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(
                state,
                storage_writer=Writer(tmp_path / str(rank)),
                planner=SavePlanner(),
                no_dist=True,
            )
            state = {"w": torch.zeros(100), "rank": -1}
            dcp.load(state, storage_reader=Reader(tmp_path / str(rank)), no_dist=True)
        return state["rank"] == rank and bool((state["w"] == rank).all())

    assert run(2, act) == [True, True]


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_hostile_object_is_not_executed_by_the_stock_planner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dcp.save({"x": Hostile(), "w": torch.ones(3)}, storage_writer=Writer(tmp_path / "c"))
    with pytest.raises(CheckpointException, match="'x'"):
        dcp.load({"x": 0}, storage_reader=Reader(tmp_path / "c"))
    assert not Path("executed").exists()
    stored = dcp.FileSystemWriter(tmp_path / "stock")
    dcp.save({"x": Hostile()}, storage_writer=stored)
    dcp.load({"x": 0}, storage_reader=dcp.FileSystemReader(tmp_path / "stock"))
    assert Path("executed").exists()  # so it would have been


def test_a_planner_that_changes_what_is_written(tmp_path):
    class Halves(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item):
            found = super().resolve_data(write_item)
            return found if isinstance(found, io.BytesIO) else found.to(torch.float16)

    state: dict[str, Any] = {"w": torch.randn(300, 70), "n": 1}
    dcp.save(state, storage_writer=Writer(tmp_path), planner=Halves())
    loaded: dict[str, Any] = {"w": torch.zeros(300, 70), "n": 0}
    dcp.load(loaded, storage_reader=Reader(tmp_path))
    assert torch.equal(loaded["w"], state["w"].half().float())


def test_saving_in_the_background(tmp_path):
    def act(rank: int) -> None:
        model, optimizer = models.build("ddp" if rank < 9 else "")
        state = models.state_of(model, optimizer)
        with Staging("4MiB") as staging:
            writer = Writer(tmp_path, staging=staging)
            for number in range(3):
                models.fill(state)
                saving = dcp.async_save(
                    state | {"step": number},
                    storage_writer=writer,
                    planner=SavePlanner(limits=LIMITS),
                )
                models.poison(state)  # at once
                saving.result()
                assert staging.nbytes <= 4 << 20
                loaded = state | {"step": -1}
                dcp.load(loaded, storage_reader=Reader(tmp_path))
                assert loaded["step"] == number
                models.check(state, "in the background")

    run(2, act)
    files = written(checkpoint.latest(tmp_path) or "")
    # What was known of the tensors is known of their copies.
    assert len(files) == 2
    assert any("[" in name for file in files.values() for name in file)


@pytest.mark.thorough
def test_sharded_state_in_the_background(tmp_path):
    def act(rank: int) -> None:
        model, optimizer = models.build("hsdp")
        state = models.state_of(model, optimizer)
        models.fill(state)
        saving = dcp.async_save(state, storage_writer=Writer(tmp_path), planner=SavePlanner())
        models.poison(state)
        saving.result()
        dcp.load(state, storage_reader=Reader(tmp_path))
        models.check(state, "in the background")

    run(4, act)


def test_staging_memory_that_is_too_small_is_told(tmp_path):
    def act(rank: int) -> str:
        with Staging("64KiB") as staging:
            try:
                dcp.async_save(
                    {"w": torch.zeros(1 << 16)}, storage_writer=Writer(tmp_path, staging=staging)
                )
            except CapacityError as error:
                return str(error)
        return ""

    assert all("does not fit" in text for text in run(1, act))


def test_a_full_drive_is_told_inside_dcps_exception(tmp_path):
    with small_file_system(tmp_path, 24 << 20) as folder:

        def act(rank: int) -> Any:
            small = nn.Linear(12, 12)
            dcp.save(small.state_dict(), storage_writer=Writer(folder), planner=SavePlanner())
            state = {f"w{rank}": torch.zeros(6 << 20), "x": torch.zeros(3)}
            try:
                dcp.save(state, storage_writer=Writer(folder), planner=SavePlanner())
            except CheckpointException as error:
                return {r: failure[0] for r, failure in error.failures.items()}
            return None

        for failures in run(2, act):
            assert set(failures) == {0, 1}
            assert {type(error) for error in failures.values()} == {NoSpaceError}
            assert len({str(error) for error in failures.values()}) == 1
        assert Path(checkpoint.latest(folder) or "").name == "step-00000000"


def test_a_dead_rank_is_told_or_gloos_error_comes(tmp_path):
    def act(rank: int) -> Any:
        from tensorspill.checkpoint import dcp_writer

        if rank == 1:
            vars(dcp_writer)["write_file"] = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        try:
            dcp.save(
                {f"w{rank}": torch.zeros(1 << 10)},
                storage_writer=Writer(tmp_path, timeout=2),
                planner=SavePlanner(),
            )
        except CheckpointException as error:
            return "ours", [type(failure[0]) for failure in error.failures.values()]
        except RuntimeError as error:
            return "gloo", str(error)
        return None

    with job(3, act, seconds=5) as ranks:
        found = [ranks.children[rank].result() for rank in (0, 2)]
        ranks.children[1].kill()
    for kind, what in found:
        assert kind == "gloo" or what == [RankFailedError] * 2
    assert checkpoint.latest(tmp_path) is None


def test_a_model_whose_names_ddp_changes(tmp_path):
    def act(rank: int) -> None:
        ddp = DistributedDataParallel(models.Model())
        state = {"model": get_model_state_dict(ddp)}
        models.fill(state)
        dcp.save(state, storage_writer=Writer(tmp_path), planner=SavePlanner(limits=LIMITS))

    run(2, act)
    state = {"model": models.Model().state_dict()}
    checkpoint.load(state, tmp_path)
    models.check(state, "from DDP")
    files = written(checkpoint.latest(tmp_path) or "")
    assert len(files) == 2


def test_what_can_not_be_staged_is_told(tmp_path):
    class Odd(torch.Tensor):
        pass

    writer = Writer(tmp_path)
    with pytest.raises(UnsupportedError, match="Odd"):
        writer.stage({"x": torch.zeros(3).as_subclass(Odd)})
    writer.close()
