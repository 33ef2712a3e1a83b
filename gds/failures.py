"""What a RuntimeError of kvikio means: decoded from its text, turned into this library's errors."""

from __future__ import annotations

import errno
import os
import re
import resource
from dataclasses import dataclass
from typing import Any

from tensorspill.errors import BrokenError, EndOfFileError, UnsupportedError
from tensorspill.gds.codes import BY_CODE, BY_TEXT, CufileCode

__all__ = ["Failure", "decode", "find_lost", "short"]

#: "cuFile error at: /build/file.cpp:230: internal error", from the innermost function.
_WHERE = re.compile(r" at: \S+:\d+: ")
#: What kvikio puts before the text that says what went wrong.
_WHAT = re.compile(r"(?:cuFile error: ?|Unable to \w+ file: ?|POSIX error(?: on \w+)?: ?)")
_CUDA = re.compile(r"CUDA_ERROR_\w+")
_NUMBER = re.compile(r"\b(50[0-4]\d|5050)\b")
_ERRNOS = {os.strerror(number): number for number in errno.errorcode}

#: The world's errors: another way of moving the same bytes would meet them as well.
_REAL = frozenset(
    {
        errno.EACCES,
        errno.EBADF,
        errno.EDQUOT,
        errno.EFAULT,
        errno.EFBIG,
        errno.EIO,
        errno.ENODATA,
        errno.ENOSPC,
        errno.EROFS,
    }
)

_LOST = "cuFile met an error of the operating system, which kvikio does not pass on"

#: cuFile says where the caller's memory is at fault; the host path would fault as well.
_MEMORY = frozenset({5012, 5013, 5014, 5017})


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in an operation.

    Attributes
    ----------
    text : str
        In one line, without a full stop.
    code : CufileCode, optional
    errno : int, optional
    memory : bool
        Whether the caller's memory is at fault.
    end : bool
        Whether the file ended before the bytes asked for.
    lost : bool
        Whether the operating system had an errno that did not come through.
    """

    text: str
    code: CufileCode | None = None
    errno: int | None = None
    memory: bool = False
    end: bool = False
    lost: bool = False

    @property
    def may_fall_back(self) -> bool:
        """Whether the fault is GPUDirect Storage's, and not the drive's or the caller's."""
        return not (self.memory or self.end or self.errno in _REAL)

    def error(self, action: str, **fields: Any) -> BrokenError | UnsupportedError:
        """Return the error to raise.

        Parameters
        ----------
        action : str
            What was being done, such as "Read".
        **fields
            `path`, `offset` and `nbytes`.
        """
        message = f"{action} failed: {self.text}"
        if self.end:
            return EndOfFileError.from_errno(errno.ENODATA, f"{action} failed", **fields)
        if self.errno is not None:
            return BrokenError.from_errno(self.errno, f"{action} failed", **fields)
        if self.memory:
            remedy = self.code.remedy if self.code else BY_CODE[5012].remedy
            return UnsupportedError(message, remedy=remedy, **fields)
        broken = BrokenError(message, remedy=self.code.remedy if self.code else None, **fields)
        broken.cufile_code = None if self.code is None else self.code.code
        return broken


def short(moved: int, asked: int, end: bool) -> Failure:
    """Return the failure of an operation that moved fewer bytes than it was asked to.

    Parameters
    ----------
    moved, asked : int
        Bytes.
    end : bool
        Whether the file ends before the bytes asked for.
    """
    return Failure(f"{moved} of {asked} bytes were moved", end=end)


def find_lost(failure: Failure, fd: int, offset: int, nbytes: int) -> Failure:
    """Return a write's failure with the errno that was lost, where the system still shows it.

    Parameters
    ----------
    failure : Failure
        Returned as it is if nothing was lost, or nothing is found.
    fd : int
        The file.
    offset, nbytes : int
        The write.
    """
    if not failure.lost:
        return failure
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and offset + nbytes > limit:
        return Failure(os.strerror(errno.EFBIG), errno=errno.EFBIG)
    room = os.fstatvfs(fd)
    if room.f_bavail * room.f_frsize < nbytes:
        return Failure(os.strerror(errno.ENOSPC), errno=errno.ENOSPC)
    return failure


def decode(error: BaseException) -> Failure:
    """Return what an exception of kvikio means.

    Notes
    -----
    cuFile returns -1 and sets errno where the operating system refused a read; kvikio takes the -1
    for an errno and says "Operation not permitted". What it was is lost.
    """
    full = " ".join(str(error).split())
    text = _WHERE.split(full)[-1]
    lost = full.startswith("cuFile error at") and text == os.strerror(errno.EPERM)
    text = _WHAT.sub("", text, count=1) if _WHAT.match(text) else text
    if lost:
        return Failure(_LOST, lost=True)
    if text in BY_TEXT:
        code = BY_TEXT[text]
        return Failure(str(code), code=code, memory=code.code in _MEMORY)
    if text in _ERRNOS:
        number = _ERRNOS[text]
        # kvikio takes device memory that was freed for host memory.
        if number == errno.EFAULT:
            return Failure("The memory was freed, or is no memory of this device", memory=True)
        return Failure(text, errno=number)
    if text == "EOF":
        return Failure("the file ended", end=True)
    if cuda := _CUDA.search(text):
        memory = cuda.group() in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_ILLEGAL_ADDRESS")
        return Failure(text, memory=memory)
    if (number_ := _NUMBER.search(text)) and int(number_.group()) in BY_CODE:
        code = BY_CODE[int(number_.group())]
        return Failure(str(code), code=code, memory=code.code in _MEMORY)
    return Failure(text or type(error).__name__)
