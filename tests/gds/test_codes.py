"""Every code of cuFile's has a cause and a remedy, and is found in what kvikio says."""

import errno
import os
import pickle
import re

import pytest

from tensorspill.errors import BrokenError, EndOfFileError, NoSpaceError, UnsupportedError
from tensorspill.gds.codes import BY_CODE, BY_TEXT, CufileCode
from tensorspill.gds.failures import decode, short
from tests.standin.build import UnavailableError, find_installed

WHERE = "/__w/kvikio/kvikio/cpp/src/file_handle.cpp:230"


def test_the_table_is_that_of_the_header():
    try:
        header = find_installed("cufile.h").read_text()
    except UnavailableError as reason:
        pytest.skip(str(reason))
    rows = re.findall(r"CUFILE_OP\(CUFILEOP_BASE_ERR \+ (\d+), +(\w+), (.*?)\) ?\\?\n", header)
    assert len(rows) > 40
    for offset, name, text in rows:
        code = BY_CODE[5000 + int(offset)]
        assert (code.name, code.text) == (name, text)
    assert len(BY_TEXT) == len(BY_CODE) == len(rows)


@pytest.mark.parametrize("code", BY_CODE.values(), ids=lambda code: code.code)
def test_each_code_has_a_remedy_and_is_decoded(code: CufileCode):
    assert code.remedy
    for text in (
        f"cuFile error at: {WHERE}: {code.text}",
        f"KvikIO failure at: {WHERE}: cuFile error:{code.text}",
    ):
        failure = decode(RuntimeError(text))
        assert failure.code == code
        error = pickle.loads(pickle.dumps(failure.error("Read", path="/x", offset=1, nbytes=2)))
        assert (error.path, error.offset, error.nbytes) == ("/x", 1, 2)
        assert code.remedy in str(error)
        if isinstance(error, BrokenError):
            assert error.cufile_code == code.code
        else:
            assert isinstance(error, UnsupportedError)
            assert not failure.may_fall_back


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, NoSpaceError), (errno.EDQUOT, NoSpaceError), (errno.EIO, BrokenError)],
)
def test_errors_of_the_operating_system(number, kind):
    for text in (
        f"KvikIO failure at: {WHERE}: Unable to write file: {os.strerror(number)}",
        f"KvikIO failure at: {WHERE}: POSIX error on pwrite: {os.strerror(number)}",
        f"KvikIO failure at: {WHERE}: POSIX error: {os.strerror(number)}",
    ):
        failure = decode(RuntimeError(text))
        error = failure.error("Write", path="/x", offset=1, nbytes=2)
        assert isinstance(error, kind)
        assert isinstance(error, BrokenError)
        assert error.errno == number
        assert not failure.may_fall_back


def test_the_errno_that_is_lost():
    failure = decode(RuntimeError(f"cuFile error at: {WHERE}: {os.strerror(errno.EPERM)}"))
    assert failure.may_fall_back
    error = failure.error("Read", path="/x")
    assert not isinstance(error, PermissionError)


def test_ends_freed_memory_and_the_unknown():
    end = decode(RuntimeError(f"KvikIO failure at: {WHERE}: POSIX error on pread: EOF"))
    assert isinstance(end.error("Read", path="/x"), EndOfFileError)
    for text in (
        f"KvikIO failure at: {WHERE}: POSIX error on pread: Bad address",
        f"CUDA error at: {WHERE}: CUDA_ERROR_INVALID_VALUE(invalid argument)",
    ):
        assert isinstance(decode(RuntimeError(text)).error("Read", path="/x"), UnsupportedError)
    for text in ("", "something new", f"CUDA error at: {WHERE}: CUDA_ERROR_ECC(x)"):
        failure = decode(RuntimeError(text))
        assert failure.may_fall_back
        assert isinstance(failure.error("Read", path="/x"), BrokenError)


def test_short_counts():
    assert isinstance(short(5, 10, True).error("Read", path="/x"), EndOfFileError)
    error = short(5, 10, False).error("Read", path="/x")
    assert isinstance(error, BrokenError)
    assert "5 of 10" in str(error)
