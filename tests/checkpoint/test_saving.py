"""Saving and loading in one process."""

import contextlib
import io
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorspill import checkpoint
from tensorspill.checkpoint import Limits, Staging, load, save
from tensorspill.errors import (
    BusyError,
    CorruptError,
    MissingFileError,
    MissingNameError,
    NoSpaceError,
    UnsupportedError,
)
from tests.faults.file_systems import small_file_system

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


State = dict[str, Any]


def fresh(nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    data = torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)
    return data % 2 == 1 if dtype is torch.bool else data.view(dtype)


def state_with_everything() -> State:
    tensors = {str(dtype): fresh(480, dtype).view(-1) for dtype in DTYPES}
    return {
        "tensors": tensors,
        "odd": [torch.tensor(3.5), torch.zeros(0, 7), torch.randn(6, 4).t(), torch.randn(1, 1)],
        "strided": torch.randn(4, 6, 3)[:, ::2],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "shared": tensors["torch.float32"],
        "objects": {"epoch": 3, "name": "ü", "best": None, "history": [1, 2.5], 7: ("a", 1)},
        "ordered": OrderedDict(lr=0.1),
    }


def poisoned(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: poisoned(value) for key, value in state.items()}
    if isinstance(state, list):
        return [poisoned(value) for value in state]
    if isinstance(state, torch.Tensor):
        empty = torch.empty_strided(state.shape, state.stride(), dtype=state.dtype)
        raw_memory = torch.empty(0, dtype=torch.uint8).set_(empty.untyped_storage())
        raw_memory.fill_(0xA5 if state.dtype is not torch.bool else 1)
        return empty
    return "poison"


def same(found: object, expected: object) -> bool:
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(same(found[k], v) for k, v in expected.items())
    if isinstance(expected, list):
        return isinstance(found, list) and all(map(same, found, expected))
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(raw(found), raw(expected))
    return found == expected


def test_all_kinds_of_values_come_back(tmp_path):
    state = state_with_everything()
    record = save(state, tmp_path)
    assert record.path == checkpoint.latest(tmp_path)
    other = poisoned(state)
    loaded = load(other, tmp_path)
    assert same(other, state)
    assert loaded.unused == ()
    assert loaded.step == record.step == 0


def test_modules_and_optimizers_come_back_into_new_ones(tmp_path):
    def make() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.BatchNorm1d(24))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def step(model: Any, optimizer: Any, scheduler: Any, seed: int = 0) -> float:
        torch.manual_seed(seed)
        loss = model(torch.randn(8, 12)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return float(loss.detach())

    first: tuple[Any, Any, Any] = make()
    second: tuple[Any, Any, Any] = make()
    for seed in range(3):
        step(*first, seed)
    names = ("model", "optimizer", "scheduler")
    save(dict(zip(names, first, strict=True)), tmp_path)
    load(dict(zip(names, second, strict=True)), tmp_path)
    assert [step(*first, s) for s in range(3, 6)] == [step(*second, s) for s in range(3, 6)]


def test_checkpoints_are_numbered_kept_and_replaced(tmp_path):
    for number in range(4):
        record = save({"n": torch.tensor(number)}, tmp_path, keep=2)
        assert record.step == number
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [
        "step-00000002",
        "step-00000003",
    ]
    save({"n": torch.tensor(20)}, tmp_path, step=20)
    save({"n": torch.tensor(21)}, tmp_path, step=20)
    state: State = {"n": torch.tensor(0)}
    load(state, tmp_path)
    assert state["n"] == 21
    load(state, tmp_path / "step-00000002")
    assert state["n"] == 2
    assert save(state, tmp_path).step == 21


def test_a_plan_is_made_once_for_a_state(tmp_path):
    state: State = {"a": torch.zeros(3), "b": 1}
    assert save(state, tmp_path).planned
    state["b"] = 2
    assert not save(state, tmp_path).planned
    state["a"] = torch.zeros(4)
    assert save(state, tmp_path).planned
    assert save(state, tmp_path, limits=Limits(min_chunk=7)).planned
    loaded: State = {"a": torch.ones(4), "b": 0}
    load(loaded, tmp_path)
    assert loaded["b"] == 2
    assert torch.equal(loaded["a"], torch.zeros(4))


def test_what_the_state_has_and_the_checkpoint_has_not(tmp_path):
    save({"a": torch.zeros(3), "o": 1, "extra": 2}, tmp_path)
    with pytest.raises(MissingNameError, match="'b'"):
        load({"a": torch.zeros(3), "b": torch.zeros(1)}, tmp_path)
    state: State = {"a": torch.ones(3), "b": torch.ones(1)}
    record = load(state, tmp_path, strict=False)
    assert record.unused == ("extra", "o")
    assert torch.equal(state["a"], torch.zeros(3))
    assert torch.equal(state["b"], torch.ones(1))
    with pytest.raises(UnsupportedError, match="shape"):
        load({"a": torch.zeros(4)}, tmp_path)
    with pytest.raises(UnsupportedError, match="Python object"):
        load({"o": torch.zeros(4)}, tmp_path)
    with pytest.raises(MissingFileError, match="no checkpoint"):
        load({"a": torch.zeros(3)}, tmp_path / "other")


def test_another_dtype_is_converted(tmp_path):
    values = torch.randn(5, 6)
    save({"w": values}, tmp_path)
    state: State = {"w": torch.zeros(5, 6, dtype=torch.bfloat16)}
    load(state, tmp_path)
    assert torch.equal(state["w"], values.bfloat16())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (lambda: None, "'x'"),
        (Path("/tmp"), "loaded"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, value, said):
    save({"x": torch.ones(1)}, tmp_path)
    with pytest.raises(UnsupportedError, match=said):
        save({"x": value}, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".tensorspill-checkpoint", "latest", "step-00000000"]


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_hostile_object_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hostile = io.BytesIO()
    torch.save(Hostile(), hostile)
    # What its writer would do: the checks when saving are his own to remove.
    monkeypatch.setattr("tensorspill.checkpoint.saving.dump", lambda *_: hostile.getvalue())
    save({"x": 1, "w": torch.ones(3)}, tmp_path / "c")
    state: State = {"x": 0, "w": torch.zeros(3)}
    with pytest.raises(CorruptError, match="'x'"):
        load(state, tmp_path / "c")
    assert not (tmp_path / "executed").exists()
    assert torch.equal(state["w"], torch.zeros(3))
    pickle.loads(pickle.dumps(Hostile()))
    assert (tmp_path / "executed").exists()  # so it would have worked


def test_a_full_drive_leaves_the_last_checkpoint(tmp_path):
    with small_file_system(tmp_path, 24 << 20) as folder:
        small = {"w": fresh(1 << 20)}
        save(small, folder)
        # Of one process, it is the error itself.
        with pytest.raises(OSError, match="No space left"):
            save({"w": fresh(40 << 20)}, folder)
        loaded = {"w": torch.zeros(1 << 20, dtype=torch.uint8)}
        load(loaded, folder)
        assert torch.equal(loaded["w"], small["w"])
        assert sorted(os.listdir(folder))[-2:] == ["lost+found", "step-00000000"]
        save(small, folder)


def test_a_folder_that_is_on_memory(tmp_path):
    folder = Path("/dev/shm") / f"tensorspill-{os.getpid()}"
    try:
        state = state_with_everything()
        save(state, folder)
        other = poisoned(state)
        load(other, folder)
        assert same(other, state)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- in the background ---------------------------------------------------------------------------


def test_later_changes_never_reach_the_file(tmp_path):
    state: State = {"a": fresh(3 << 20), "b": torch.randn(64, 64).t(), "list": [1]}
    kept = {"a": state["a"].clone(), "b": state["b"].clone(), "list": [1]}
    with Staging("16MiB") as staging:
        saving = checkpoint.async_save(state, tmp_path, staging=staging)
        state["a"].fill_(7)
        state["b"].fill_(7)
        state["list"][0] = 2
        record = saving.result()
        assert saving.remainder == 0
        assert saving.staged == (3 << 20) + 64 * 64 * 4
    loaded = {"a": torch.zeros_like(state["a"]), "b": torch.zeros(64, 64), "list": None}
    load(loaded, record.path)
    assert same(loaded, kept)


def test_what_does_not_fit_is_written_before_it_returns(tmp_path):
    state: State = {f"t{i}": fresh(1 << 20) for i in range(6)}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    with Staging("2MiB") as staging:
        for _ in range(2):
            saving = checkpoint.async_save(state, tmp_path, staging=staging)
            assert staging.nbytes <= 2 << 20
            assert (saving.staged, saving.remainder) == (2 << 20, 4 << 20)
            for tensor in state.values():
                tensor.fill_(7)
            saving.result()
            loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            load(loaded, tmp_path)
            assert same(loaded, kept)
            for name, tensor in state.items():
                tensor.copy_(kept[name])


def test_a_load_waits_for_the_save_before_it(tmp_path):
    state: State = {"w": fresh(8 << 20)}
    checkpoint.async_save(state, tmp_path)
    loaded = {"w": torch.zeros_like(state["w"])}
    load(loaded, tmp_path)
    assert torch.equal(loaded["w"], state["w"])


def test_a_second_save_waits(tmp_path):
    for number in range(4):
        saving = checkpoint.async_save({"w": fresh(4 << 20), "n": number}, tmp_path)
    assert saving.result().step == 3
    state: State = {"n": -1}
    load(state, tmp_path)
    assert state["n"] == 3


def test_a_second_save_is_refused(tmp_path):
    state: State = {"w": fresh(64 << 20)}
    first = checkpoint.async_save(state, tmp_path)
    if not first.done():
        # It may end right now; then this is no refusal.
        with contextlib.suppress(BusyError):
            checkpoint.async_save(state, tmp_path, busy="refuse").result()
    first.result()
    checkpoint.async_save(state, tmp_path, busy="refuse").result()


def test_an_error_surfaces_once(tmp_path):
    small, large = {"w": fresh(10)}, {"w": fresh(40 << 20)}
    with small_file_system(tmp_path, 24 << 20) as folder:

        def fail() -> checkpoint.AsyncSave:
            saving = checkpoint.async_save(large, folder)
            saving.wait()
            return saving

        fail()
        with pytest.raises(NoSpaceError):
            save(small, folder)
        save(small, folder)
        seen = fail()
        with pytest.raises(NoSpaceError):
            seen.result()
        save(small, folder)
        fail()
        with pytest.raises(NoSpaceError):
            checkpoint.async_save(small, folder)
        assert save(small, folder).step == 2


def test_staging_memory_is_taken_once_and_given_up(tmp_path):
    staging = Staging("8MiB")
    state: State = {"a": fresh(1 << 20), "b": fresh(12345)}
    for _ in range(3):
        checkpoint.async_save(state, tmp_path, staging=staging).result()
        assert 1 << 20 < staging.nbytes <= 8 << 20
    snapshot = staging.snapshot(list(state.values()))
    with pytest.raises(BusyError):
        staging.snapshot(list(state.values()), wait=0)
    snapshot.release()
    snapshot = staging.snapshot(list(state.values()))
    del snapshot  # is as good as its release
    snapshot = staging.snapshot(list(state.values()))
    staging.close()
    assert staging.nbytes
    snapshot.release()
    snapshot.release()
    assert staging.nbytes == 0
    staging.close()


def test_arguments_are_checked(tmp_path):
    state: State = {"w": torch.zeros(1)}
    for wrong in (
        {"step": -1},
        {"step": True},
        {"timeout": 0},
        {"keep": 0},
        {"replicated": "model.*"},
    ):
        with pytest.raises(UnsupportedError):
            save(state, tmp_path, **wrong)
    assert checkpoint.latest(tmp_path) is None
