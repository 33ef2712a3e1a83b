import errno
import pickle

import pytest

from tensorspill import errors
from tensorspill.errors import (
    BrokenError,
    CapacityError,
    ClosedError,
    CorruptError,
    EndOfFileError,
    MissingFileError,
    MissingNameError,
    NoSpaceError,
    PermissionDeniedError,
    SpillError,
    UnsupportedError,
)

EXAMPLES = [
    ClosedError("closed", path="/x"),
    CorruptError("tensor 'w' changed", names=["w"], path="/x", offset=5, nbytes=7),
    UnsupportedError("no", remedy="Do it otherwise"),
    MissingNameError("no tensor 'w'"),
    CapacityError("no room", asked=5, free=3, largest=2),
    BrokenError.from_errno(errno.EIO, "Read failed", path="/x", offset=1, nbytes=2),
    BrokenError("gone", path="/x"),
    MissingFileError("gone", errno=errno.ENOENT, path="/x"),
    NoSpaceError("full", path="/x", offset=1, nbytes=2).with_free(100),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_pickle_with_all_they_say(error: SpillError):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    fields = ("path", "offset", "nbytes", "remedy", "errno", "asked", "free", "largest", "names")
    for name in fields:
        assert getattr(copy, name, None) == getattr(error, name, None)


@pytest.mark.parametrize(
    ("code", "cls", "builtin"),
    [
        (errno.ENOENT, MissingFileError, FileNotFoundError),
        (errno.EACCES, PermissionDeniedError, PermissionError),
        (errno.ENODATA, EndOfFileError, EOFError),
        (errno.ENOSPC, NoSpaceError, OSError),
        (errno.EDQUOT, NoSpaceError, CapacityError),
        (errno.EIO, BrokenError, OSError),
    ],
)
def test_an_errno_becomes_the_most_specific_error(code, cls, builtin):
    error = BrokenError.from_errno(code, "It failed", path="/x", offset=8, nbytes=9)
    assert type(error) is cls
    assert isinstance(error, builtin)
    assert error.errno == code
    assert error.filename == "/x"
    for text in ("It failed", "/x", "8", "9", errno.errorcode[code]):
        assert text in str(error)


def test_all_errors_are_spill_errors():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), SpillError)


def test_a_capacity_error_says_how_many_bytes():
    text = str(CapacityError("no room", asked=5, free=3, largest=2))
    assert all(number in text for number in "532")
