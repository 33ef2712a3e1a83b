"""The demonstration: what it trains on, where it puts things, what it finds and says."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tensorspill.cli import main
from tensorspill.demo.corpus import read_corpus
from tensorspill.demo.drive import DriveRate
from tensorspill.demo.model import GPT, Shape
from tensorspill.demo.place import Mount, find_mount, temporary_folder
from tensorspill.demo.report import Report
from tensorspill.demo.spilled import (
    Needs,
    SpilledRun,
    divide_budget,
    measure_needs,
    train_spilled,
)
from tensorspill.demo.summary import introduction, summary
from tensorspill.demo.training import Recipe, Run, digest, train_in_memory
from tensorspill.errors import BrokenError, CapacityError, MissingFileError, UnsupportedError
from tensorspill.timeline import Recording, StepRecord

SMALL = Recipe(shape=Shape(layers=6, width=128, heads=2, context=16), steps=3, batch=2)
NEEDS = Needs(model=48 << 20, states=96 << 20, resident=6 << 20, optimizer=4 << 20)
MOVED = StepRecord(
    number=0,
    begin=0.0,
    seconds=1.6,
    compute=1.0,
    stall=0.5,
    transfer=7.0,
    hidden=6.5,
    bytes_read=5 << 30,
    bytes_written=2 << 30,
    by_path={"direct": 7 << 30},
)
REPORT = Report(
    recipe=Recipe(steps=3),
    text="a text",
    needs=NEEDS,
    budget_bytes=12 << 20,
    folder=Path("/a/folder/with/a/rather/long/name/that/does/not/fit/into/one/narrow/line/x"),
    mount=Mount("/dev/nvme0n1p2", "ext4"),
    memory=Run((5.260313510894775, 4.5, 4.362875938415527), 1.5),
    memory_weights="ab",
    spilled=SpilledRun(
        Run((5.260313510894775, 4.5, 4.362875938415527), 1.6),
        "ab",
        DriveRate(1.2e9, 2.4e9),
        MOVED,
        11 << 20,
        140 << 20,
    ),
    seconds=5.0,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute in one thread: steps this small are no faster with several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus():
    return read_corpus(None, 1 << 16)


# -- the whole -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "tensorspill.cli", "demo", "--json", "--steps", "2"]
    done = subprocess.run(
        [*command, "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done, folder


def test_it_finds_equal_losses_within_the_budget(demonstrated):
    done, _ = demonstrated
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["losses_equal"] is True
    assert found["weights_equal"] is True
    assert found["loss"] == found["losses"][-1] == found["losses_in_memory"][-1]
    assert len(found["losses"]) == 2
    assert found["losses"][0] != found["losses"][1]
    everything = found["model_bytes"] + found["optimizer_bytes"]
    assert 0 < found["peak_bytes"] <= found["budget_bytes"] <= everything / 5
    assert 0 <= found["hidden_pct"] <= 100
    assert found["gbps"] > 0
    assert sum(found["bytes_by_path"].values()) == found["bytes_read"] + found["bytes_written"]
    assert found["bytes_written"] > 2 * found["model_bytes"]
    assert found["spilled_bytes"] > 0.98 * everything


def test_nothing_but_the_json_is_printed_and_nothing_is_left(demonstrated):
    done, folder = demonstrated
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    assert list(folder.iterdir()) == []


@pytest.mark.thorough
def test_people_get_a_report(tmp_path, capsys):
    status = main(["demo", "--steps", "1", "--folder", str(tmp_path)])
    said = capsys.readouterr().out
    assert status == 0
    assert "equal to the last bit" in said
    assert "\x1b" not in said
    assert not list(tmp_path.iterdir())


def test_a_budget_that_is_too_small(tmp_path, capsys):
    status = main(["demo", "--steps", "1", "--folder", str(tmp_path), "--budget", "3MiB", "--json"])
    assert status == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "smallest that works" in said.err
    assert not list(tmp_path.iterdir())


# -- the parts -----------------------------------------------------------------------------------


def test_both_trainings_agree_and_another_seed_does_not(tmp_path, corpus):
    budget = measure_needs(SMALL).total // 2
    memory, weights = train_in_memory(SMALL, corpus, lambda *_: None)
    steps: list[tuple[int, float]] = []
    told: list[Recording] = []
    spilled = train_spilled(
        SMALL,
        corpus,
        tmp_path,
        budget,
        lambda number, loss: steps.append((number, loss)),
        told.append,
    )
    assert spilled.run.losses == memory.losses
    assert spilled.weights == weights
    assert steps == list(enumerate(memory.losses, 1))
    assert len(told[0].steps) == len(memory.losses) + 1
    assert spilled.peak_bytes <= budget
    other, other_weights = train_in_memory(replace(SMALL, seed=1), corpus, lambda *_: None)
    assert other.losses != memory.losses
    assert other_weights != weights


@pytest.mark.thorough
def test_the_smallest_budget_works_and_one_page_less_does_not(tmp_path, corpus):
    recipe = replace(SMALL, steps=1)
    smallest = measure_needs(recipe).smallest
    with pytest.raises(CapacityError, match=str(smallest)):
        divide_budget(recipe, smallest - 1)
    spilled = train_spilled(recipe, corpus, tmp_path, smallest, lambda *_: None, lambda _: None)
    assert spilled.peak_bytes <= smallest


def test_training_stops_at_its_limit(corpus):
    run, _ = train_in_memory(SMALL, corpus, lambda *_: None, limit=0)
    assert len(run.losses) == 1


def test_a_digest_tells_one_bit():
    model = GPT(SMALL.shape)
    before = digest(model, model.state_dict())
    bits = next(model.blocks[5].parameters()).data.view(torch.int32)
    bits[3] ^= 1
    assert digest(model, model.state_dict()) != before
    bits[3] ^= 1
    assert digest(model, model.state_dict()) == before


def test_the_sizes_are_those_of_the_model():
    model = GPT(SMALL.shape)
    needs = measure_needs(SMALL)
    assert needs.model == sum(p.nbytes for p in model.parameters())
    assert needs.states == 2 * needs.model
    assert needs.smallest < needs.total / 2


def test_the_text_is_the_same_each_time_and_python(corpus):
    again = read_corpus(None, 1 << 16)
    assert torch.equal(corpus.text, again.text)
    assert corpus.text.numel() == 1 << 16
    assert b"import " in corpus.text.numpy().tobytes()


def test_batches_are_pieces_of_the_text(corpus):
    first, second = (list(corpus.batches(2, 3, 8, seed=5)) for _ in range(2))
    whole = corpus.text.numpy().tobytes()
    for (inputs, targets), (same, _) in zip(first, second, strict=True):
        assert torch.equal(inputs, same)
        assert inputs.shape == targets.shape == (3, 8)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert bytes(inputs[0].tolist()) in whole
    assert not torch.equal(first[0][0], first[1][0])


def test_another_text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    assert read_corpus(path, 100).text.tolist() == list(range(100))
    with pytest.raises(UnsupportedError, match="more than 128 bytes"):
        next(read_corpus(path, 100).batches(1, 1, 128, 0))
    with pytest.raises(MissingFileError, match="missing"):
        read_corpus(tmp_path / "missing", 100)
    with pytest.raises(BrokenError):
        read_corpus(tmp_path, 100)


# -- where ---------------------------------------------------------------------------------------


def test_the_folder_is_made_where_it_is_asked_for_and_removed(tmp_path):
    with temporary_folder(tmp_path / "new") as folder:
        assert folder.parent == tmp_path / "new"
        (folder / "something").write_text("x")
    assert not list(tmp_path.iterdir())
    with temporary_folder(tmp_path):
        pass
    assert tmp_path.exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(BrokenError, match="Can't make a folder"),
        temporary_folder(tmp_path / "file" / "below"),
    ):
        pass


def test_memory_is_no_drive(tmp_path, monkeypatch):
    shared = Path("/dev/shm")
    if not shared.is_dir() or not find_mount(shared).in_memory:
        pytest.skip("no tmpfs at /dev/shm")
    if find_mount(tmp_path).in_memory:
        pytest.skip("the place for temporary files is in memory as well")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/shm")
    monkeypatch.chdir(tmp_path)
    with temporary_folder(None) as folder:
        assert folder.parent == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with temporary_folder(None) as folder:
        assert folder.parent == tmp_path / "cache" / "tensorspill"


def test_the_mount_of_proc_is_proc():
    assert find_mount(Path("/proc")).kind == "proc"


# -- what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_report_fits(width, encoding, corpus):
    bytes_said = io.BytesIO()
    file = io.TextIOWrapper(bytes_said, encoding=encoding)
    console = Console(file=file, width=width)
    console.print(introduction(REPORT.recipe, corpus, NEEDS, 12 << 20, REPORT.folder, REPORT.mount))
    console.print(summary(REPORT, console))
    file.flush()
    said = bytes_said.getvalue().decode(encoding)
    assert max(map(len, said.splitlines())) <= width
    assert "…" not in said
    for figure in ("12 MiB", "11 MiB", "7 GiB direct"):
        assert figure in " ".join(said.split())
    assert ("4.362875938415527" in said) == (width > 40)


def test_the_report_says_what_does_not_hold():
    unequal = replace(REPORT, memory=Run((5.25, 4.5, 3.0), 1.5))
    exceeding = replace(REPORT, budget_bytes=(11 << 20) - 1)
    changed = replace(REPORT, memory_weights="cd")
    claims = {"losses differ": unequal, "exceeded": exceeding, "parameters differ": changed}
    for claim, report in claims.items():
        assert not report.holds
        file = io.StringIO()
        console = Console(file=file, width=100)
        console.print(summary(report, console))
        assert claim in file.getvalue()
    assert REPORT.holds
    assert unequal.as_json()["losses_equal"] is False
    assert exceeding.as_json()["within_budget"] is False


def test_rates_of_a_mix():
    drive = DriveRate(read=1e9, write=2e9)
    assert drive.of_mix(1 << 30, 0) == pytest.approx(1e9)
    assert drive.of_mix(2 << 30, 2 << 30) == pytest.approx(4 / 3 * 1e9)
    assert drive.of_mix(0, 0) == 0
