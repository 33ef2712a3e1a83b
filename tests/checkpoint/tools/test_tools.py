"""What can be done with a checkpoint: on the command line, and below it."""

import io
import json
import os
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tensorspill.checkpoint.files.chunks import Box, Chunk, ObjectChunk
from tensorspill.checkpoint.files.commit import begin
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.manifest import assemble
from tensorspill.checkpoint.files.opened import read_manifest
from tensorspill.checkpoint.files.reading import Reader
from tensorspill.checkpoint.files.writing import write_file
from tensorspill.checkpoint.tools.comparing import compare
from tensorspill.checkpoint.tools.exporting import export_safetensors
from tensorspill.checkpoint.tools.torch_file import export_torch
from tensorspill.checkpoint.tools.verifying import verify
from tensorspill.cli import main
from tensorspill.errors import CorruptError, MissingFileError, UnsupportedError
from tensorspill.pool import BufferPool
from tests.checkpoint.files.helpers import (
    fresh,
    mixed_state,
    same,
    save,
)


def run(capsys, *arguments):
    """Run the command with --json; return its status and what it printed."""
    status = main(["checkpoint", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def text(capsys, *arguments):
    """Run the command for people."""
    status = main(["checkpoint", *map(str, arguments)])
    return status, capsys.readouterr().out


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def serialised(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def save_nested(root, name, tensors, objects):
    """Save tensors and objects by their paths in a nested state."""
    names = {".".join(map(str, path)): path for path in (*tensors, *objects)}
    flat = {".".join(map(str, path)): tensor for path, tensor in tensors.items()}
    with (
        begin(root, name) as pending,
        Engines(root) as engines,
        BufferPool("16MiB") as staging,
    ):
        written = write_file(
            pending.folder,
            "rank0.safetensors",
            [Chunk(key, Box.whole(tensor.shape), tensor) for key, tensor in flat.items()],
            [
                ObjectChunk(".".join(map(str, path)), serialised(value))
                for path, value in objects.items()
            ],
            engine=engines,
            staging=staging,
        )
        shapes = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in flat.items()}
        return pending.commit(assemble([written], shapes, key_paths=names, step=9))


class TestListing:
    def test_ls(self, tmp_path, capsys):
        for step in range(3):
            save(tmp_path, f"s{step}", {"a": fresh((10, 10))}, {"o": b"x"}, step=step)
        (tmp_path / "t.saving").mkdir()
        status, found = run(capsys, "ls", tmp_path)
        assert status == 0
        assert [each["name"] for each in found["checkpoints"]] == ["s2", "s1", "s0"]
        assert [each["latest"] for each in found["checkpoints"]] == [True, False, False]
        assert found["checkpoints"][0]["step"] == 2
        assert found["leftovers"] == ["t.saving"]
        assert (tmp_path / "t.saving").exists()
        status, said = text(capsys, "ls", tmp_path)
        assert status == 0
        assert all(word in said for word in ("s0", "s1", "s2", "latest", "t.saving"))

    def test_damaged_ones_are_listed_as_such(self, tmp_path, capsys):
        path = save(tmp_path, "a", {"a": fresh((10, 10))})
        flip(os.path.join(path, "manifest.json"), 300)
        _, found = run(capsys, "ls", tmp_path)
        assert "changed" in found["checkpoints"][0]["problem"]

    def test_nothing_and_nowhere(self, tmp_path, capsys):
        assert run(capsys, "ls", tmp_path)[1]["checkpoints"] == []
        assert main(["checkpoint", "ls", str(tmp_path / "no")]) == 3
        assert main(["checkpoint", "verify", str(tmp_path)]) == 3
        assert "no committed checkpoint" in capsys.readouterr().err

    def test_show(self, tmp_path, capsys):
        path = save(tmp_path, "a", mixed_state(), {"o": b"x"}, writers=2, step=4)
        status, found = run(capsys, "show", tmp_path)
        assert status == 0
        assert found["checkpoint"] == path
        assert found["step"] == 4
        assert found["tensors"]["blocks"]["shape"] == [512, 1024]
        assert len(found["tensors"]["blocks"]["parts"]) == 2
        status, said = text(capsys, "show", path)
        assert status == 0
        assert "bfloat16" in said
        assert "object o" in said


class TestVerify:
    def test_all_is_well(self, tmp_path, capsys):
        path = save(tmp_path, "a", mixed_state(), {"o": b"x" * 5000}, writers=3)
        status, found = run(capsys, "verify", tmp_path)
        assert status == 0
        assert found["problems"] == []
        assert found["nbytes"] == read_manifest(path).nbytes
        status, said = text(capsys, "verify", path)
        assert status == 0
        assert "All as it was written" in said

    def test_every_byte_of_every_file_counts(self, tmp_path):
        path = save(tmp_path, "a", mixed_state(), {"o": b"x" * 5000}, writers=2)
        manifest = read_manifest(path)
        for file in manifest.files:
            where = os.path.join(path, file.name)
            places = [*torch.randint(file.nbytes, (6,)).tolist(), 0, 100, file.nbytes - 1]
            for at in places:
                flip(where, at)
                found = verify(path)
                assert len(found.problems) == 1
                problem = found.problems[0]
                assert problem.path == where
                assert problem.offset is not None
                assert problem.nbytes is not None
                assert problem.offset <= at < problem.offset + problem.nbytes
                flip(where, at)
        assert verify(path).problems == ()

    def test_several_problems_are_all_told(self, tmp_path, capsys):
        path = save(tmp_path, "a", {"a": fresh((3000, 1000))}, writers=3)
        flip(os.path.join(path, "rank0.safetensors"), 5000)
        flip(os.path.join(path, "rank0.safetensors"), 3_000_000)
        os.truncate(os.path.join(path, "rank1.safetensors"), 100)
        os.unlink(os.path.join(path, "rank2.safetensors"))
        status, found = run(capsys, "verify", path)
        assert status == 1
        assert len(found["problems"]) == 4
        status, said = text(capsys, "verify", path)
        assert status == 1
        assert "4 problems" in said


class TestDiff:
    def test_equal_however_they_are_divided(self, tmp_path, capsys):
        state = mixed_state()
        first = save(tmp_path / "1", "a", state, {"o": b"x"})
        second = save(tmp_path / "2", "a", state, {"o": b"x"}, writers=3)
        assert run(capsys, "diff", first, second)[0] == 0
        found = compare(first, second)
        assert found.differences == ()
        assert found.equal == len(state) + 1
        again = save(tmp_path / "3", "a", state, {"o": b"x"})
        assert compare(first, again).by_digest == len(state)

    def test_differences(self, tmp_path, capsys):
        state = {name: torch.randn(50, 60) for name in "abcd"} | {"e": torch.arange(4)}
        other = {name: tensor.clone() for name, tensor in state.items() if name != "d"}
        other["a"][3, 4] += 2.5
        other["b"] = other["b"].double()
        other["c"] = other["c"][:49]
        other["e"][1] = 7
        other["f"] = torch.ones(1)
        first = save(tmp_path / "1", "a", state, {"o": b"x", "p": b"y"})
        second = save(tmp_path / "2", "a", other, {"o": b"z", "q": b"y"}, writers=2)
        status, found = run(capsys, "diff", first, second)
        assert status == 1
        kinds = {each["name"]: each["kind"] for each in found["differences"]}
        assert kinds == {
            "a": "values", "b": "dtype", "c": "shape", "d": "only in first", "e": "values",
            "f": "only in second", "o": "object", "p": "only in first", "q": "only in second",
        }  # fmt: skip
        largest = {each["name"]: each["largest"] for each in found["differences"]}
        assert largest["a"] == pytest.approx(2.5)
        assert largest["e"] == 6
        status, said = text(capsys, "diff", first, second)
        assert status == 1
        assert "1 elements differ" in said

    def test_a_nan_on_one_side(self, tmp_path, capsys):
        state = {"a": torch.zeros(5)}
        first = save(tmp_path / "1", "a", state)
        state["a"][2] = float("nan")
        second = save(tmp_path / "2", "a", state)
        _, found = run(capsys, "diff", first, second)
        assert found["differences"][0]["largest"] == "nan"


class TestExport:
    @pytest.fixture
    def nested(self, tmp_path):
        self.tensors = {
            ("model", "layer.weight"): fresh((700, 300), torch.bfloat16),
            ("model", "layer.bias"): fresh((300,), torch.bfloat16),
            ("model", "embedding"): fresh((2000, 300)),
            ("optimizer", "state", "0", "step"): torch.tensor(3.0),
            ("optimizer", "groups", 0, "momentum"): fresh((5,)),
        }
        self.objects = {
            ("epoch",): 7,
            ("optimizer", "groups", 0, "lr"): 0.1,
            ("optimizer", "groups", 1, "lr"): 0.2,
            ("random",): {"cpu": torch.arange(1000, dtype=torch.uint8), "seed": (1, 2)},
        }
        return save_nested(tmp_path / "root", "a", self.tensors, self.objects)

    def test_safetensors(self, tmp_path, capsys, nested):
        status, found = run(capsys, "export", nested, "--to", tmp_path / "out", "--select", "model")
        assert status == 0
        assert found["tensors"] == 3
        assert os.listdir(tmp_path / "out") == ["model.safetensors"]
        back = load_file(tmp_path / "out" / "model.safetensors")
        assert back.keys() == {"layer.weight", "layer.bias", "embedding"}
        for path, tensor in self.tensors.items():
            if path[0] == "model":
                assert same(back[str(path[1])], tensor)

    def test_shards(self, tmp_path, capsys):
        state = mixed_state()
        path = save(tmp_path / "root", "a", state, {"o": serialised(1)}, writers=3)
        status, said = text(
            capsys, "export", path, "--to", tmp_path / "out", "--shard", "1MB"
        )  # fmt: skip
        assert status == 0
        assert "left out: object o" in said
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
        assert index["weight_map"].keys() == state.keys()
        files = set(index["weight_map"].values())
        assert len(files) > 2
        assert set(os.listdir(tmp_path / "out")) == files | {"model.safetensors.index.json"}
        for file in files:
            for name, tensor in load_file(tmp_path / "out" / file).items():
                assert index["weight_map"][name] == file
                assert same(tensor, state[name])

    def test_torch(self, tmp_path, capsys, nested):
        target = tmp_path / "out.pt"
        status, found = run(capsys, "export", nested, "--to", target, "--format", "torch")
        assert status == 0
        assert found["skipped"] == []
        back = torch.load(target, weights_only=True)
        assert back.keys() == {"model", "optimizer", "epoch", "random"}
        for path, tensor in self.tensors.items():
            node: Any = back
            for key in path:
                node = node[key]
            assert same(node, tensor)
        assert back["epoch"] == 7
        assert [group["lr"] for group in back["optimizer"]["groups"]] == [0.1, 0.2]
        assert torch.equal(back["random"]["cpu"], torch.arange(1000, dtype=torch.uint8))
        assert back["random"]["seed"] == (1, 2)
        assert {p.name for p in tmp_path.iterdir()} == {"root", "out.pt"}

    def test_torch_below_a_key(self, tmp_path, nested):
        with Reader(nested) as reader:
            export_torch(reader, tmp_path / "m.pt", select="optimizer/groups")
            back = torch.load(tmp_path / "m.pt", weights_only=True)
            assert [group["lr"] for group in back] == [0.1, 0.2]
            with pytest.raises(UnsupportedError, match="there are"):
                export_torch(reader, tmp_path / "m.pt", select="nothing")

    def test_objects_that_are_not_safe_are_left_out(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "executed"),)

        path = save_nested(tmp_path / "root", "a", {("w",): fresh((3,))}, {("bomb",): Bomb()})
        with Reader(path) as reader:
            found = export_torch(reader, tmp_path / "out.pt")
        assert found.skipped == ("bomb",)
        assert not (tmp_path / "executed").exists()
        assert torch.load(tmp_path / "out.pt", weights_only=True).keys() == {"w"}

    @pytest.mark.parametrize("form", ["safetensors", "torch"])
    def test_what_is_damaged_is_not_exported(self, tmp_path, form):
        path = save(tmp_path / "root", "a", {"a": fresh((3000, 1000))})
        flip(os.path.join(path, "rank0.safetensors"), 7_000_000)
        with Reader(path) as reader, pytest.raises(CorruptError):
            export(reader, tmp_path / "out", form)
        assert not (tmp_path / "out.pt").exists()
        assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []

    def test_nothing_is_overwritten(self, tmp_path, nested):
        (tmp_path / "model.safetensors").write_bytes(b"mine")
        with Reader(nested) as reader, pytest.raises(UnsupportedError):
            export_safetensors(reader, tmp_path)
        assert (tmp_path / "model.safetensors").read_bytes() == b"mine"

    def test_a_place_that_is_not_there(self, tmp_path, nested):
        with Reader(nested) as reader, pytest.raises(MissingFileError):
            export_torch(reader, tmp_path / "no" / "out.pt")

    @pytest.mark.parametrize("form", ["safetensors", "torch"])
    def test_memory_is_bounded(self, tmp_path, form):
        state = {"large": fresh((200 << 20,), torch.uint8)}
        path = save(tmp_path / "root", "a", state)
        del state
        with Reader(path) as reader:
            small = {"w": fresh((10,))}
            with Reader(save(tmp_path / "small", "a", small)) as other:
                export(other, tmp_path / "warm", form)
            peak()
            before = peak()
            export(reader, tmp_path / "out", form)
        assert peak() - before < 120 << 20


def export(reader, path, form):
    if form == "torch":
        export_torch(reader, path.with_suffix(".pt"))
    else:
        export_safetensors(reader, path)


def peak():
    """Return the most memory that was resident since the last call."""
    with open("/proc/self/status") as file:
        found = {line.split(":")[0]: line.split()[1] for line in file if line.startswith("Vm")}
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return int(found["VmHWM"]) * 1024


def test_hugging_face_reads_the_export(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=200, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tensors = {("model", name): tensor for name, tensor in model.state_dict().items()}
    path = save_nested(tmp_path / "root", "a", tensors, {})
    with Reader(path) as reader:
        export_safetensors(reader, tmp_path / "hf", select="model", shard_bytes="100KB")
    config.save_pretrained(tmp_path / "hf")
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert back.keys() == model.state_dict().keys()
    assert all(same(back[name], tensor) for name, tensor in model.state_dict().items())
