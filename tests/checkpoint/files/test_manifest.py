"""The manifest: what it says is checked, whoever wrote it."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.manifest import Manifest, _sha256, assemble
from tensorspill.checkpoint.files.records import (
    BoxRecord,
    FileRecord,
    ObjectRecord,
    TensorRecord,
    Written,
)
from tensorspill.errors import CorruptError, UnsupportedError

FILE = FileRecord("rank0.safetensors", 4096 + 96 + 5, 4096, 7)
BOXES = (
    BoxRecord(Box((0, 0), (2, 4)), FILE.name, 4096, 32, 65536, b"\1" * 8),
    BoxRecord(Box((2, 0), (4, 4)), FILE.name, 4096 + 32, 64, 65536, b"\2" * 8),
)
MANIFEST = Manifest(
    step=3,
    tensors={"w": TensorRecord(torch.float32, (6, 4), BOXES)},
    objects={"o": ObjectRecord(FILE.name, 4096 + 96, 5, 1 << 63)},
    files=(FILE,),
    plan_digest="abc",
    key_paths={"w": ("model", 0, "w")},
    versions={"torch": "2"},
    sequence=12,
)
TEXT = MANIFEST.to_json()


def signed(body):
    """Return a file with that body and a digest that fits, as somebody hostile would write it."""
    text = body if isinstance(body, str) else json.dumps(body)
    return (
        '{"format":"tensorspill checkpoint 1","sequence":12,'
        f'"sha256":"{_sha256(12, text.encode())}","manifest":\n{text}\n}}\n'
    )


def body():
    return json.loads(TEXT)["manifest"]


def test_round_trip():
    assert Manifest.from_json(TEXT) == MANIFEST
    assert Manifest.from_json(signed(body())) == MANIFEST
    assert json.loads(TEXT)["sequence"] == 12
    assert MANIFEST.nbytes == FILE.nbytes


@given(st.data())
def test_any_change_is_found(data):
    at = data.draw(st.integers(0, len(TEXT) - 1))
    change = data.draw(st.sampled_from(["cut", "drop", "flip", "insert"]))
    changed = {
        "cut": TEXT[:at],
        "drop": TEXT[:at] + TEXT[at + 1 :],
        "flip": TEXT[:at] + chr(ord(TEXT[at]) ^ 1) + TEXT[at + 1 :],
        "insert": TEXT[:at] + "0" + TEXT[at:],
    }[change]
    if re.match(r'.*"sequence":0+12,', changed):
        return  # the same number
    with pytest.raises(CorruptError) as caught:
        Manifest.from_json(changed, "/there/manifest.json")
    assert caught.value.path == "/there/manifest.json"


def test_pretty_printing_is_a_change():
    with pytest.raises(CorruptError):
        Manifest.from_json(json.dumps(json.loads(TEXT), indent=2))


HOSTILE = {
    "absolute name": lambda b: b["files"][0].__setitem__(0, "/etc/passwd"),
    "name with dots": lambda b: b["files"][0].__setitem__(0, "../x.safetensors"),
    "name in a folder": lambda b: b["files"][0].__setitem__(0, "a/x.safetensors"),
    "name with a zero": lambda b: b["files"][0].__setitem__(0, "x\0.safetensors"),
    "hidden name": lambda b: b["files"][0].__setitem__(0, ".x.safetensors"),
    "name is no text": lambda b: b["files"][0].__setitem__(0, ["x"]),
    "file twice": lambda b: b["files"].append(b["files"][0]),
    "negative length": lambda b: b["files"][0].__setitem__(1, -1),
    "length is no integer": lambda b: b["files"][0].__setitem__(1, 5000.0),
    "length is true": lambda b: b["files"][0].__setitem__(1, True),
    "header beyond the file": lambda b: b["files"][0].__setitem__(2, 10**6),
    "digest is no number": lambda b: b["files"][0].__setitem__(3, "xyz"),
    "unknown dtype": lambda b: b["tensors"]["w"].__setitem__(0, "float3"),
    "dtype is code": lambda b: b["tensors"]["w"].__setitem__(0, "__class__"),
    "other dtype": lambda b: b["tensors"]["w"].__setitem__(0, "float64"),
    "negative shape": lambda b: b["tensors"]["w"].__setitem__(1, [-6, -4]),
    "huge shape": lambda b: b["tensors"]["w"].__setitem__(1, [10**17, 10**17]),
    "huge shape of nothing": lambda b: b["tensors"]["w"].__setitem__(1, [0, 10**17, 10**17]),
    "a part is missing": lambda b: b["tensors"]["w"][2].pop(),
    "parts overlap": lambda b: b["tensors"]["w"][2][1].__setitem__(0, [1, 0]),
    "a part outside": lambda b: b["tensors"]["w"][2][1].__setitem__(0, [3, 0]),
    "a part of other dimensions": lambda b: b["tensors"]["w"][2][1].__setitem__(0, [2]),
    "no such file": lambda b: b["tensors"]["w"][2][0].__setitem__(2, 1),
    "file -1": lambda b: b["tensors"]["w"][2][0].__setitem__(2, -1),
    "in the header": lambda b: b["tensors"]["w"][2][0].__setitem__(3, 0),
    "beyond the file": lambda b: b["tensors"]["w"][2][0].__setitem__(3, 8192),
    "between elements": lambda b: b["tensors"]["w"][2][0].__setitem__(3, 4097),
    "no span": lambda b: b["tensors"]["w"][2][0].__setitem__(4, 0),
    "an odd span": lambda b: b["tensors"]["w"][2][0].__setitem__(4, 65537),
    "an endless span": lambda b: b["tensors"]["w"][2][0].__setitem__(4, 1 << 40),
    "no digests": lambda b: b["tensors"]["w"][2][0].__setitem__(5, ""),
    "digests that are none": lambda b: b["tensors"]["w"][2][0].__setitem__(5, "!!!"),
    "object outside": lambda b: b["objects"]["o"].__setitem__(2, 6),
    "object in no file": lambda b: b["objects"]["o"].__setitem__(0, 5),
    "too few values": lambda b: b["objects"]["o"].pop(),
    "key path of floats": lambda b: b["key_paths"].__setitem__("w", [1.5]),
    "key path is text": lambda b: b["key_paths"].__setitem__("w", "model"),
    "step is text": lambda b: b.__setitem__("step", "3"),
    "a field more": lambda b: b.__setitem__("more", 1),
    "a field less": lambda b: b.pop("versions"),
    "versions of numbers": lambda b: b["versions"].__setitem__("torch", 2),
    "tensors is a list": lambda b: b.__setitem__("tensors", []),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_cant_be_is_refused_even_with_a_digest_that_fits(what):
    changed = body()
    HOSTILE[what](changed)
    with pytest.raises(CorruptError):
        Manifest.from_json(signed(changed))


@pytest.mark.parametrize("text", ["", "[", "null", "[1]", "3", '"x"', "[" * 100_000, "NaN"])
def test_bodies_that_are_no_manifest(text):
    with pytest.raises(CorruptError):
        Manifest.from_json(signed(text))


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"{}", b"\0" * 5000])
def test_files_that_are_no_manifest(data):
    with pytest.raises(CorruptError):
        Manifest.from_json(data)


def written(*boxes, objects=(), file=FILE):
    return Written(file, tuple(("w", torch.float32, box) for box in boxes), objects, 0.0, 0)


SHAPES = {"w": (torch.float32, (6, 4))}


def test_writers_are_joined():
    other = FileRecord("rank1.safetensors", 5000, 4096, 1)
    found = assemble([written(BOXES[0]), written(BOXES[1], file=other)], SHAPES, step=1)
    assert found.files == (FILE, other)
    assert found.tensors["w"].boxes == BOXES
    assert {"tensorspill", "torch"} <= found.versions.keys()
    assert Manifest.from_json(found.to_json()).tensors.keys() == {"w"}


@pytest.mark.parametrize(
    "parts",
    [
        [written(BOXES[0])],
        [written(*BOXES), written(BOXES[0], file=FileRecord("b.safetensors", 5000, 4096, 1))],
        [written(BOXES[0]), written(BOXES[1], file=FileRecord(FILE.name, 5000, 4096, 1))],
        [Written(FILE, (("v", torch.float32, BOXES[0]),), (), 0.0, 0), written(*BOXES)],
        [Written(FILE, tuple(("w", torch.int32, box) for box in BOXES), (), 0.0, 0)],
        [
            written(*BOXES, objects=(("o", ObjectRecord(FILE.name, 4096, 1, 0)),)),
            written(
                objects=(("o", ObjectRecord(FILE.name, 4096, 1, 0)),),
                file=FileRecord("b.safetensors", 5000, 4096, 1),
            ),
        ],
    ],
)
def test_what_was_not_planned_is_no_checkpoint(parts):
    with pytest.raises(UnsupportedError):
        assemble(parts, SHAPES)
