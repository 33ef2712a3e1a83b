"""Where things go in a file is worked out once for a state, and is right for every later one."""

import itertools
import json

import pytest
import torch

from tensorspill.checkpoint.files.chunks import Box, Chunk, ObjectChunk
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.layout import Layouts, lay_out
from tensorspill.checkpoint.files.writing import write_file
from tensorspill.errors import UnsupportedError
from tensorspill.pool import BufferPool
from tests.checkpoint.files.helpers import mixed_state


def whole(name, tensor, partial=False):
    return Chunk(name, Box.whole(tensor.shape), tensor, partial)


def entries(layout):
    return json.loads(layout.header()[8:])


def same_place(a, b):
    return a.header() == b.header() and a.offsets == b.offsets and a.sizes == b.sizes


def test_a_state_that_was_written_before_is_laid_out_as_if_it_was_new(tmp_path):
    layouts = Layouts()
    with Engines(tmp_path) as engines, BufferPool("16MiB", poison=True) as staging:
        for number in range(3):
            chunks = [whole(name, tensor) for name, tensor in mixed_state().items()]
            objects = [ObjectChunk("note", b"x" * number)]
            files: list[bytes] = []
            for known in (layouts, None):
                name = f"{number}-{len(files)}.safetensors"
                write_file(
                    *(str(tmp_path), name, chunks, objects),
                    engine=engines,
                    staging=staging,
                    layouts=known,
                )
                files.append((tmp_path / name).read_bytes())
            assert files[0] == files[1]


@pytest.mark.parametrize(
    "other",
    [
        whole("b", torch.zeros(64)),
        whole("a", torch.zeros(32)),
        whole("a", torch.zeros(8, 8)),
        whole("a", torch.zeros(64, dtype=torch.int32)),
        whole("a", torch.zeros(64, dtype=torch.complex64)),
        whole("a", torch.zeros(64), partial=True),
        Chunk("a", Box((64,), (64,)), torch.zeros(64), True),
    ],
)
def test_what_differs_in_anything_has_a_place_of_its_own(other):
    layouts = Layouts()
    beside = whole("c", torch.zeros(1024))
    first = [lay_out([whole("a", torch.zeros(64)), beside], [], layouts) for _ in range(2)]
    assert same_place(*first)
    found = lay_out([other, beside], [], layouts)
    assert same_place(found, lay_out([other, beside], []))
    assert entries(found) != entries(first[0])
    again = lay_out([whole("a", torch.ones(64)), beside], [], layouts)
    assert same_place(again, first[0])


def test_objects_are_told_apart_from_tensors_that_have_their_names():
    layouts = Layouts()
    names = ["object:a", "object:a#2", "__metadata__", "x"]
    chunks = [whole(name, torch.zeros(4)) for name in names]
    for _ in range(2):
        layout = lay_out(chunks, [ObjectChunk("a", b"1"), ObjectChunk("a#2", b"2")], layouts)
        found = entries(layout)
        assert len(found) == len(names) + 2 + 1
        assert found["__metadata__"]["format"] == "pt"
        assert found["object:a#3"]["dtype"] == "U8"
        places = [row["data_offsets"] for key, row in found.items() if key != "__metadata__"]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(sorted(places)))


def test_a_header_that_was_not_finished_is_finished_by_the_next_save():
    layouts = Layouts()
    chunks = [whole(f"t{number}", torch.zeros(16)) for number in range(9)]
    lay_out(chunks, [], layouts).describe(4)
    assert same_place(lay_out(chunks, [], layouts), lay_out(chunks, []))


def test_content_of_another_shape_is_refused_though_the_names_are_known():
    layouts = Layouts()
    lay_out([whole("a", torch.zeros(64))], [], layouts)
    with pytest.raises(UnsupportedError, match="'a' has content of shape"):
        lay_out([Chunk("a", Box((0,), (64,)), torch.zeros(32))], [], layouts)
