"""Models that are built on the drive, and loaded there, in bounded memory."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from tensorspill.errors import BrokenError, CapacityError, MissingFileError, UnsupportedError
from tensorspill.residency import residency_of
from tensorspill.training import init, load_safetensors, offload, offloaded
from tests.residency.models import SOME_KINDS, VALUES, WIDTH, Model, batches
from tests.residency.test_residency import one_thread
from tests.training.trainer import check_equal, make, train

__all__ = ["one_thread"]

safetensors = pytest.importorskip("safetensors.torch")


class Scaled(Model):
    """Changes values in every way after they were drawn."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            nn.init.orthogonal_(block.expand.weight)
            block.contract.weight.data.mul_(0.5)
            with torch.no_grad():
                block.contract.bias /= 3
                torch.add(block.norm.weight, 1, out=block.norm.weight)
        self.blocks[0].expand.weight.detach().fill_(0.25)
        self.head.weight = nn.Parameter(self.bytes.weight * 2)


class Cloned(nn.Module):
    """Copies layers deeply, as torch's own encoder does."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.0, batch_first=True)
        self.bytes = nn.Embedding(VALUES, WIDTH)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VALUES)
        for parameter in self.body.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, text):
        return self.head(self.body(self.bytes(text)))


@pytest.mark.parametrize("kind", [*SOME_KINDS, Scaled, Cloned])
def test_what_is_built_on_the_drive_has_the_same_bits(tmp_path, kind):
    torch.manual_seed(3)
    reference = kind()
    torch.manual_seed(3)
    with init(tmp_path, 90_000, min_bytes=0):
        model = kind()
    with offloaded(model) as handle:
        assert handle.statistics().parameters > 0
        assert train(model, 2) == train(reference, 2)
        handle.close(restore=True)
    check_equal(model, reference)


@pytest.mark.thorough
def test_a_model_that_is_much_larger_than_the_budget(tmp_path):
    class Deep(Model):
        def __init__(self):
            super().__init__(60)

    torch.manual_seed(3)
    reference = Deep()
    torch.manual_seed(3)
    with init(tmp_path, 70_000, min_bytes=0, gradients="spilled"):
        model = Deep()
    total = sum(p.nbytes for p in model.parameters())
    assert total > 10 * 70_000
    with offloaded(model) as handle:
        assert train(model, 2) == train(reference, 2)
        assert handle.statistics().peak_bytes <= 70_000
        handle.close(restore=True)
    check_equal(model, reference)


def test_a_second_module_stays_an_ordinary_one(tmp_path):
    torch.manual_seed(3)
    expected = nn.Linear(WIDTH, 7)
    torch.manual_seed(3)
    with init(tmp_path, 90_000, min_bytes=0):
        beside = nn.Linear(WIDTH, 7)
        model = Model()
    check_equal(beside, expected)
    assert residency_of(beside.weight) is None
    offloaded(model).close()


def test_what_goes_wrong_while_building(tmp_path):
    with pytest.raises(UnsupportedError, match="No module"), init(tmp_path):
        pass
    with pytest.raises(ZeroDivisionError), init(tmp_path, 1000, min_bytes=0):
        raise_after(Model)
    with pytest.raises(CapacityError, match="smallest"), init(tmp_path, 1000, min_bytes=0):
        model = Model()
    del model
    with pytest.raises(UnsupportedError, match="blocks"), init(tmp_path, blocks=[]):
        pass
    assert not list(tmp_path.rglob("*.spill"))
    assert nn.Linear(2, 2)(torch.ones(1, 2)).isfinite().all()


def raise_after(kind):
    kind()
    raise ZeroDivisionError


# -- loading -------------------------------------------------------------------------------------


def save_shards(model, folder, shards=3):
    """Write the model's state as such folders are: some files and an index."""
    folder.mkdir()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = list(state)
    where: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: state[name] for name in names[number::shards]}
        safetensors.save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("values", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_sharded_folder_is_loaded(tmp_path, kind, values):
    reference, _ = make(kind, seed=8)
    save_shards(reference, tmp_path / "saved")
    torch.manual_seed(3)
    with init(tmp_path, 90_000, min_bytes=0, values=values):
        model = kind()
    assert load_safetensors(model, tmp_path / "saved") == ([], [])
    with offloaded(model) as handle:
        assert train(model, 2) == train(reference, 2)
        handle.close(restore=True)
    check_equal(model, reference)


def test_without_values_there_are_none(tmp_path):
    with init(tmp_path, 90_000, min_bytes=1024, values=False):
        model = Model()
    state = offloaded(model).state()
    assert state["blocks.1.expand.weight"].isnan().all()
    assert state["blocks.1.expand.bias"].isfinite().all()
    offloaded(model).close()


def test_one_file_and_other_dtypes(tmp_path):
    model, reference = make(Model)
    (tmp_path / "saved").mkdir()
    state = {name: value.bfloat16() for name, value in reference.state_dict().items()}
    safetensors.save_file(state, tmp_path / "saved" / "model.safetensors")
    offload(model, tmp_path, 90_000, min_bytes=0)
    load_safetensors(model, tmp_path / "saved")
    reference.load_state_dict(state)
    offloaded(model).close(restore=True)
    check_equal(model, reference)


def test_folders_that_do_not_fit(tmp_path):
    model, reference = make(Model)
    save_shards(reference, tmp_path / "saved")
    index = tmp_path / "saved" / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    offload(model, tmp_path, 90_000, min_bytes=0)
    del where["weight_map"]["head.bias"]
    where["weight_map"]["other"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(where))
    with pytest.raises(UnsupportedError, match=r"lack head\.bias and have other"):
        load_safetensors(model, tmp_path / "saved")
    assert load_safetensors(model, tmp_path / "saved", strict=False) == (["head.bias"], ["other"])
    where["weight_map"]["head.bias"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(where))
    with pytest.raises(UnsupportedError, match="outside"):
        load_safetensors(model, tmp_path / "saved")
    index.write_text("{}")
    with pytest.raises(BrokenError, match="index"):
        load_safetensors(model, tmp_path / "saved")
    index.unlink()
    (tmp_path / "saved" / "model-00001-of-00003.safetensors").write_bytes(b"nothing")
    with pytest.raises(BrokenError, match="can't be read"):
        load_safetensors(model, tmp_path / "saved")
    with pytest.raises(MissingFileError):
        load_safetensors(model, tmp_path / "nowhere")
    wrong = {name: value.clone() for name, value in reference.state_dict().items()}
    wrong["head.bias"] = torch.ones(3)
    (tmp_path / "wrong").mkdir()
    safetensors.save_file(wrong, tmp_path / "wrong" / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"head\.bias.*\(3,\)"):
        load_safetensors(model, tmp_path / "wrong")
    offloaded(model).close(restore=True)
    check_equal(model, reference)


BOUNDED = """
import resource, sys, torch
from torch import nn
import tensorspill.training as training
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, x):
        return x + self.linear(x)

def build(count):
    return nn.Sequential(*(Block() for _ in range(count)))

def use(count, name):
    with training.init(sys.argv[1], "16MiB"):
        model = build(count)
    training.load_safetensors(model, sys.argv[1] + "/" + name)
    training.offloaded(model).close()

torch.set_num_threads(1)
peaks = []
use(4, "few")  # imports, compiles, fills caches
Path("/proc/self/clear_refs").write_text("5")
before = resident()
use(40, "many")
peak = next(l for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l)
print(int(peak.split()[1]) * 1024 - before)
"""


def test_memory_stays_bounded(tmp_path):
    for name, count in (("few", 4), ("many", 40)):
        (tmp_path / name).mkdir()
        for shard in range(4):
            safetensors.save_file(
                {
                    f"{n}.linear.{kind}": torch.randn(*shape)
                    for n in range(shard, count, 4)
                    for kind, shape in (("weight", (1024, 1024)), ("bias", (1024,)))
                },
                tmp_path / name / f"{shard}.safetensors",
            )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BOUNDED), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # Of 160 MiB. What is built, and what is resident after, may be there at a time.
    assert int(done.stdout) < 64 << 20


def test_a_model_that_is_offloaded_is_trained_after_loading(tmp_path):
    model, reference = make(Model)
    save_shards(reference, tmp_path / "saved")
    with init(tmp_path, 90_000, min_bytes=0, values=False):
        model = Model()
    load_safetensors(model, tmp_path / "saved")
    assert model(next(batches(1))).isfinite().all()
    offloaded(model).close()
