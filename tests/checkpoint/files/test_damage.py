"""Bit flips, truncated and replaced files: found when they are read, and not before."""

import os
import shutil
import signal

import pytest
import torch

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.commit import latest
from tensorspill.checkpoint.files.opened import read_manifest
from tensorspill.checkpoint.files.reading import Reader, Want
from tensorspill.errors import (
    CorruptError,
    MissingFileError,
    SpillError,
    UnsupportedError,
)
from tests.checkpoint.files.helpers import fresh, load, poisoned, same, save

STATE = {"a": fresh((4000, 300)), "b": fresh((7, 5), torch.bfloat16)}
FILE = "rank0.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original")
    save(root, "step", STATE, {"o": b"some text"})
    return root


@pytest.fixture
def root(original, tmp_path):
    shutil.copytree(original, tmp_path / "root")
    return tmp_path / "root"


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def rows(path, first, count):
    out = poisoned((count, 300), torch.float32)
    with Reader(path) as reader:
        reader.read([Want("a", Box((first, 0), (count, 300)), out)])
    return out


def test_a_flipped_bit_is_found_by_whoever_reads_its_digest_and_by_nobody_else(root):
    path = root / "step"
    box = read_manifest(path).tensors["a"].boxes[0]
    at = 2000 * 1200 + 17
    flip(path / FILE, box.offset + at)
    for first, count in ((1999, 3), (0, 4000), (1950, 60)):
        with pytest.raises(CorruptError) as caught:
            rows(path, first, count)
        assert caught.value.path == str(path / FILE)
        start, length = caught.value.offset, caught.value.nbytes
        assert start is not None
        assert length is not None
        assert start <= box.offset + at < start + length
    assert same(rows(path, 0, 1900), STATE["a"][:1900])
    assert same(rows(path, 2100, 1900), STATE["a"][2100:])


def test_a_flipped_bit_in_a_small_tensor_and_in_an_object(root):
    path = root / "step"
    manifest = read_manifest(path)
    flip(path / FILE, manifest.tensors["b"].boxes[0].offset + 69)
    with pytest.raises(CorruptError):
        load(path)
    flip(path / FILE, manifest.objects["o"].offset + 3)
    with Reader(path) as reader, pytest.raises(CorruptError):
        reader.read_object("o")


@pytest.mark.parametrize("change", [-1, -5000, 1, 4096])
def test_a_file_of_another_length(root, change):
    path = root / "step" / FILE
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CorruptError) as caught:
        load(root / "step")
    assert caught.value.path == str(path)


def test_a_missing_file(root):
    (root / "step" / FILE).unlink()
    with pytest.raises(MissingFileError):
        load(root / "step")


def test_a_link_and_a_pipe_in_place_of_a_file(root, tmp_path):
    path = root / "step" / FILE
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(UnsupportedError):
        load(root / "step")
    path.unlink()
    os.mkfifo(path)
    signal.alarm(30)  # it must not wait for somebody to write to the pipe
    try:
        with pytest.raises(UnsupportedError):
            load(root / "step")
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("at", [0, 50, 200, 400, -2])
def test_a_flipped_bit_in_the_manifest(root, at):
    path = root / "step" / "manifest.json"
    flip(path, at % path.stat().st_size)
    with pytest.raises(CorruptError) as caught:
        Reader(root / "step")
    assert caught.value.path == str(path)


def test_a_manifest_that_is_a_link_or_missing(root, tmp_path):
    path = root / "step" / "manifest.json"
    path.rename(tmp_path / "m")
    with pytest.raises(MissingFileError):
        Reader(root / "step")
    with pytest.raises(MissingFileError):
        latest(root)
    path.symlink_to(tmp_path / "m")
    with pytest.raises(SpillError):
        Reader(root / "step")
    with pytest.raises(MissingFileError):
        latest(root)


@pytest.mark.parametrize(
    "text", [b"", b"step/../step\n", b"/etc\n", b"..\n", b"\xff\n", b"step.saving\n", b"step\0\n"]
)
def test_a_latest_that_leads_elsewhere(root, text):
    (root / "latest").write_bytes(text)
    with pytest.raises(CorruptError):
        latest(root)


def test_a_latest_that_names_nothing(root):
    (root / "latest").write_text("stop\n")
    with pytest.raises(MissingFileError):
        latest(root)
