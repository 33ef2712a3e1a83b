"""The pieces that a rank writes: the same in every save, with the content of now."""

import torch

from tensorspill.checkpoint.distributed.description import describe
from tensorspill.checkpoint.distributed.nested import flatten
from tensorspill.checkpoint.distributed.share import pieces_of
from tensorspill.checkpoint.files.chunks import Box, Source
from tests.checkpoint.plans import plan_of


class Counting(Source):
    def __init__(self, count):
        self.dtype, self.shape = torch.int64, (count,)

    def fill(self, start, out):
        torch.arange(start, start + out.numel(), out=out)


def held(seed):
    generator = torch.Generator().manual_seed(seed)
    trained = torch.randn(8, 4, generator=generator, requires_grad=True)
    state = {
        "w": trained,
        "empty": torch.zeros(0, 3),
        "note": {"epoch": seed},
        "source": Counting(10),
    }
    return describe(*flatten(state)), trained


def test_pieces_of_one_plan_take_the_content_of_each_save():
    first, _ = held(0)
    pieces = pieces_of(plan_of([first.parts]), 0, first.parts)
    for seed in (1, 2):
        now, trained = held(seed)
        found = {piece.name: piece.of(now.values) for piece in pieces}
        content = found["w"].tensor
        assert isinstance(content, torch.Tensor)
        assert not content.requires_grad
        assert torch.equal(content, trained)
        assert content.data_ptr() == trained.data_ptr()
        assert found["empty"].tensor.shape == (0, 3)
        assert found["source"].tensor is now.values[3]
        assert not any(chunk.partial for chunk in found.values())


def test_a_piece_of_a_part_is_a_view_of_its_rows():
    now, trained = held(3)
    pieces = pieces_of(plan_of([now.parts]), 0, now.parts)
    whole = next(piece for piece in pieces if piece.name == "w")
    rows = whole._replace(box=Box((2, 0), (3, 4)), inside=Box((2, 0), (3, 4)), partial=True)
    found = rows.of(now.values)
    assert isinstance(found.tensor, torch.Tensor)
    assert torch.equal(found.tensor, trained[2:5])
    assert found.partial
