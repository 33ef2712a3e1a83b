"""The files: safetensors for everybody, blocks for the drive."""

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tensorspill.checkpoint.files.chunks import Box, Chunk, ObjectChunk
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.writing import write_file
from tensorspill.errors import UnsupportedError
from tensorspill.pool import BufferPool
from tests.checkpoint.files.helpers import DTYPES, fresh, mixed_state, same


@pytest.fixture
def engines(tmp_path):
    with Engines(tmp_path) as engines:
        yield engines


@pytest.fixture
def staging():
    with BufferPool("16MiB", poison=True) as pool:
        yield pool


def whole(name, tensor):
    return Chunk(name, Box.whole(tensor.shape), tensor)


def header_of(path):
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        return 8 + length, json.loads(file.read(length))


def test_the_library_reads_what_was_written(tmp_path, engines, staging):
    state = mixed_state()
    chunks = [whole(name, tensor) for name, tensor in state.items()]
    done = write_file(
        str(tmp_path), "a.safetensors", chunks, [ObjectChunk("note", b"text")],
        engine=engines, staging=staging,
    )  # fmt: skip
    back = load_file(tmp_path / "a.safetensors")
    assert bytes(back.pop("object:note")) == b"text"
    assert back.keys() == state.keys()
    assert all(same(back[name], state[name]) for name in state)
    assert done.file.nbytes == (tmp_path / "a.safetensors").stat().st_size
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "tensorspill": "1"}


def test_whole_blocks_come_first_at_blocks_and_nothing_is_between(tmp_path, engines, staging):
    chunks = [whole(name, tensor) for name, tensor in mixed_state().items()]
    write_file(str(tmp_path), "a.safetensors", chunks, engine=engines, staging=staging)
    start, header = header_of(tmp_path / "a.safetensors")
    assert start % 4096 == 0
    del header["__metadata__"]
    ranges = sorted(entry["data_offsets"] for entry in header.values())
    end, odd = 0, False
    for begin, stop in ranges:
        assert begin == end
        odd = odd or (stop - begin) % 4096 != 0
        assert odd or begin % 4096 == 0
        assert not odd or (stop - begin) % 4096 or begin == stop
        end = stop
    assert start + end == (tmp_path / "a.safetensors").stat().st_size


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path, engines, staging, dtype):
    plain, strided = fresh((33, 50), dtype), fresh((33, 50), dtype).t()
    chunks = [whole("plain", plain), whole("strided", strided)]
    done = write_file(str(tmp_path), "a.safetensors", chunks, engine=engines, staging=staging)
    assert {name: kept for name, kept, _ in done.boxes} == {"plain": dtype, "strided": dtype}
    back = load_file(tmp_path / "a.safetensors")
    for name, tensor in (("plain", plain), ("strided", strided)):
        found = back[name]
        assert same(found.reshape(-1).view(dtype).view(tensor.shape), tensor)
        told = dtype is not found.dtype
        with safe_open(tmp_path / "a.safetensors", "pt") as file:
            dtypes = json.loads((file.metadata() or {}).get("dtypes", "{}"))
        assert (dtypes.get(name) == str(dtype).removeprefix("torch.")) == told


def test_lazy_conjugates_and_negatives_are_kept_as_they_look(tmp_path, engines, staging):
    tensor = torch.randn(40, 30, dtype=torch.complex64)
    chunks = [whole("conj", tensor.conj()), whole("neg", tensor.conj().imag)]
    write_file(str(tmp_path), "a.safetensors", chunks, engine=engines, staging=staging)
    back = load_file(tmp_path / "a.safetensors")
    assert torch.equal(torch.view_as_complex(back["conj"]), tensor.conj())
    assert torch.equal(back["neg"], tensor.conj().imag)


def test_names_of_all_kinds(tmp_path, engines, staging):
    names = ["", "__metadata__", 'quote"\n', "naïve/π", "w[0:2]", "a" * 5000, "object:w", "../x"]
    state = {name: fresh((3,)) for name in names}
    chunks = [whole(name, tensor) for name, tensor in state.items()]
    both = fresh((4, 5))
    chunks += [
        Chunk("w", Box((0, 0), (2, 5)), both[:2], partial=True),
        Chunk("w", Box((2, 0), (2, 5)), both[2:], partial=True),
    ]
    write_file(
        str(tmp_path), "a.safetensors", chunks, [ObjectChunk("w", b"x")],
        engine=engines, staging=staging,
    )  # fmt: skip
    back = load_file(tmp_path / "a.safetensors")
    assert len(back) == len(names) + 3
    assert same(back["w[2:4,0:5]"], both[2:])
    for name in set(names) - {"__metadata__"}:
        assert same(back[name], state[name])
    assert same(back["__metadata__#2"], state["__metadata__"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("name", ["\n", "\\", '"', "\x7f", "π", "\U0001f600", "a"])
def test_the_header_fits_whatever_names_consist_of(tmp_path, engines, staging, name, dtype):
    chunks = [
        Chunk(name * (i + 1), Box((5,), (2,)), fresh((2,), dtype), partial=True) for i in range(60)
    ]
    write_file(str(tmp_path), "a.safetensors", chunks, engine=engines, staging=staging)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert set(file.keys()) == {f"{chunk.name}[5:7]" for chunk in chunks}
        told = json.loads(file.metadata().get("dtypes", "{}"))
    assert len(told) == (60 if dtype.is_complex else 0)


def test_an_empty_file_is_one_too(tmp_path, engines, staging):
    done = write_file(str(tmp_path), "a.safetensors", [], engine=engines, staging=staging)
    assert load_file(tmp_path / "a.safetensors") == {}
    assert done.file.nbytes == done.file.header_bytes == 4096


def test_progress_tells_of_all_bytes(tmp_path, engines, staging):
    told: list[int] = []
    chunks = [whole("a", fresh((9 << 20,))), whole("b", fresh((3000, 1000)).t())]
    done = write_file(
        str(tmp_path), "a.safetensors", chunks,
        engine=engines, staging=staging, progress=told.append,
    )  # fmt: skip
    assert told == sorted(told)
    assert len(told) > 3
    assert told[-1] == done.file.nbytes


def test_one_engine_will_do_and_the_folder_may_be_below_it(tmp_path, engines, staging):
    (tmp_path / "below").mkdir()
    tensor = fresh((100,))
    write_file(
        str(tmp_path / "below"), "a.safetensors", [whole("a", tensor)],
        engine=engines.host, staging=staging,
    )  # fmt: skip
    assert same(load_file(tmp_path / "below" / "a.safetensors")["a"], tensor)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk("a", Box((0,), (3,)), torch.zeros(4)),
        Chunk("a", Box((-1,), (4,)), torch.zeros(4)),
        Chunk("a", Box((0, 0), (4,)), torch.zeros(4)),
        whole("a", torch.zeros(4, device="meta")),
        whole("a", torch.zeros(4).to_sparse()),
    ],
)
def test_what_cant_be_kept_is_refused_before_a_file_is_made(tmp_path, engines, staging, chunk):
    with pytest.raises(UnsupportedError):
        write_file(str(tmp_path), "a.safetensors", [chunk], engine=engines, staging=staging)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "../a.safetensors", "/a.safetensors", "", ".a.safetensors"])
def test_names_stay_in_the_folder(tmp_path, engines, staging, name):
    with pytest.raises(UnsupportedError):
        write_file(str(tmp_path), name, [], engine=engines, staging=staging)


def test_staging_as_small_as_one_digest(tmp_path, engines):
    tensor = fresh((4096, 2500)).t()
    with BufferPool("4MiB") as small:
        write_file(
            str(tmp_path), "a.safetensors", [whole("a", tensor)], engine=engines, staging=small
        )
    assert same(load_file(tmp_path / "a.safetensors")["a"], tensor)
