import errno
import pickle

import pytest
import torch

from tensorspill.checkpoint.distributed.wire import (
    decode_error,
    decode_written,
    encode_error,
    encode_written,
    from_rank,
)
from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.records import BoxRecord, FileRecord, ObjectRecord, Written
from tensorspill.errors import (
    BrokenError,
    BusyError,
    CapacityError,
    CorruptError,
    MissingFileError,
    NoSpaceError,
    OutcomeUnknownError,
    RankFailedError,
    UnsupportedError,
)

ERRORS = [
    BusyError("busy"),
    CorruptError("wrong", path="/x", offset=1, nbytes=2),
    UnsupportedError("no", remedy="Do it otherwise"),
    CapacityError("full", asked=5, free=3, largest=2),
    BrokenError.from_errno(errno.EIO, "Write failed", path="/x"),
    BrokenError("gone"),
    MissingFileError("gone", errno=errno.ENOENT, path="/x"),
    NoSpaceError("full", path="/x", nbytes=3).with_free(7),
    RankFailedError("lost"),
    OutcomeUnknownError("unknown"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_on_every_rank(error):
    told = from_rank(error, 3)
    for other in (decode_error(encode_error(told)), pickle.loads(pickle.dumps(told))):
        assert type(other) is type(error)
        assert str(other) == str(told)
        assert other.ranks == (3,)
        assert getattr(other, "errno", None) == getattr(error, "errno", None)
    assert str(told) == f"Rank 3: {error}"
    assert from_rank(told, 0) is told


def test_what_is_not_ours_becomes_ours():
    told = from_rank(ZeroDivisionError("division by zero"), 1)
    assert isinstance(told, BrokenError)
    assert "Rank 1: ZeroDivisionError: division by zero" in str(told)


def test_what_was_written_travels():
    boxes = (
        ("a.b", torch.bfloat16, BoxRecord(Box((0, 3), (2, 1)), "f", 4096, 4, 65536, b"\n" * 8)),
        ("c", torch.float64, BoxRecord(Box((), ()), "f", 8192, 8, 65536, b"12345678")),
    )
    objects = (("o", ObjectRecord("f", 9000, 7, 1 << 63)),)
    written = Written(FileRecord("f", 9007, 4096, 99), boxes, objects, 0.5, 12)
    assert decode_written(encode_written(written)) == written
