"""Every error that tensorspill raises, with what the user needs to act on it.

This module imports nothing of the project, so that every part may raise from it.

The classes say who has to act:

========================  =====================================================
`ClosedError`             you closed (or forked away from) the object you used
`BusyError`               a transfer still uses the object you want to give up
`BrokenError`             the world did it: a drive, a file system, a limit
`NoSpaceError`            a full disk: both a `BrokenError` and a `CapacityError`
`CorruptError`            the bytes read are not the bytes written
`CapacityError`           no room in a pool or spill file
`UnsupportedError`        the request can't be carried out as asked
`MissingNameError`        no tensor of that name
`RankFailedError`         another rank died or hangs
`OutcomeUnknownError`     whoever commits died while committing
========================  =====================================================
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Iterable
from typing import Any, Self

__all__ = [
    "BrokenError",
    "BusyError",
    "CapacityError",
    "ClosedError",
    "CorruptError",
    "EndOfFileError",
    "MissingFileError",
    "MissingNameError",
    "NoSpaceError",
    "OutcomeUnknownError",
    "PermissionDeniedError",
    "RankFailedError",
    "SpillError",
    "UnsupportedError",
]


class SpillError(Exception):
    """Base class of all errors of this library.

    Parameters
    ----------
    message : str
        What happened, in one sentence.
    path : str, optional
        The file concerned.
    offset : int, optional
        Byte offset in that file.
    nbytes : int, optional
        Number of bytes asked for at that offset.
    remedy : str, optional
        What the user can do about it.

    Attributes
    ----------
    ranks : tuple of int
        Where several ranks work together: those at which it happened.

    Notes
    -----
    Instances pickle with all their fields, so that a worker process can send one.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.offset = offset
        self.nbytes = nbytes
        self.remedy = remedy
        self.ranks: tuple[int, ...] = ()

    def _details(self) -> list[str]:
        named = (("path", self.path), ("offset", self.offset), ("bytes", self.nbytes))
        return [f"{name} {value}" for name, value in named if value is not None]

    def __str__(self) -> str:
        details = self._details()
        text = f"{self.message} ({', '.join(details)})" if details else self.message
        return f"{text}. {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__.copy())


def _rebuild(cls: type[SpillError], message: str, fields: dict[str, Any]) -> SpillError:
    error = cls.__new__(cls)
    SpillError.__init__(error, message)
    for name, value in fields.items():
        setattr(error, name, value)
    return error


class ClosedError(SpillError, ValueError):
    """The engine, file, pool, buffer or spill file was closed, or belongs to the parent process."""


class BusyError(SpillError):
    """A live transfer still uses what should be released; wait for the transfer first."""


class UnsupportedError(SpillError, ValueError):
    """The request can't be carried out as asked: layout, dtype, device, overlap or option."""


class MissingNameError(SpillError, KeyError):
    """No tensor of that name is stored."""


class CorruptError(SpillError):
    """Bytes read back differ from the bytes written (digest mismatch).

    Attributes
    ----------
    names : tuple of str
        The tensors concerned, where they have names.
    """

    def __init__(self, message: str, *, names: Iterable[str] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.names = tuple(names)


class CapacityError(SpillError):
    """No room: `asked`, `free` and `largest` (the largest free piece) are in bytes.

    The object that raised it is unchanged.
    """

    def __init__(
        self,
        message: str,
        *,
        asked: int | None = None,
        free: int | None = None,
        largest: int | None = None,
        path: str | os.PathLike[str] | None = None,
        remedy: str | None = None,
    ) -> None:
        SpillError.__init__(self, message, path=path, nbytes=asked, remedy=remedy)
        self.asked = asked
        self.free = free
        self.largest = largest

    def _details(self) -> list[str]:
        named = (("free", self.free), ("largest free piece", self.largest))
        return super()._details() + [f"{n} {v} bytes" for n, v in named if v is not None]


class BrokenError(SpillError, OSError):
    """The operating system, file system, drive or GPU failed; `errno` or `cufile_code` says how.

    Raised by a transfer, the bytes of its writes on the drive are undefined within the ranges that
    were asked for and untouched elsewhere; the destinations of its reads are undefined.
    """

    #: cuFile's error code, 5001 and up, where GPUDirect Storage failed.
    cufile_code: int | None = None

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        path: str | os.PathLike[str] | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
        remedy: str | None = None,
    ) -> None:
        SpillError.__init__(self, message, path=path, offset=offset, nbytes=nbytes, remedy=remedy)
        self.errno = errno
        self.strerror = None if errno is None else os.strerror(errno)
        self.filename = self.path

    def _details(self) -> list[str]:
        if self.errno is None:
            return super()._details()
        name = _errno.errorcode.get(self.errno, str(self.errno))
        return [*super()._details(), f"{name}: {self.strerror}"]

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.__dict__ | {
            "errno": self.errno,
            "strerror": self.strerror,
            "filename": self.filename,
        }
        return _rebuild, (type(self), self.message, fields)

    @classmethod
    def from_errno(cls, code: int, message: str, **fields: Any) -> BrokenError:
        """Return the most specific `BrokenError` for an errno, with its usual remedy.

        Parameters
        ----------
        code : int
            A positive errno.
        message : str
            What was being done.
        **fields
            `path`, `offset`, `nbytes`, `remedy`.
        """
        fields["remedy"] = fields.get("remedy") or _REMEDIES.get(code)
        return _BY_ERRNO.get(code, cls)(message, errno=code, **fields)

    @classmethod
    def from_oserror(cls, error: OSError, message: str, **fields: Any) -> BrokenError:
        """Return the most specific `BrokenError` for an `OSError` of the standard library."""
        return cls.from_errno(error.errno or _errno.EIO, message, **fields)


class MissingFileError(BrokenError, FileNotFoundError):
    """The file or folder does not exist."""


class PermissionDeniedError(BrokenError, PermissionError):
    """The file or folder may not be used by this process."""


class EndOfFileError(BrokenError, EOFError):
    """The file ends before the bytes asked for; it was shorter, or was truncated meanwhile."""


class NoSpaceError(BrokenError, CapacityError):
    """The file system, a quota or a file size limit has no room for the bytes written."""

    def __init__(self, message: str, *, errno: int | None = _errno.ENOSPC, **fields: Any) -> None:
        BrokenError.__init__(self, message, errno=errno, **fields)
        self.asked = self.nbytes
        self.free: int | None = None
        self.largest: int | None = None

    def with_free(self, free: int) -> Self:
        """Record how many bytes the file system has free, and return the error."""
        self.free = self.largest = free
        return self


class RankFailedError(BrokenError):
    """A rank (see `ranks`) died, hangs or did not come, so what all did together ended for all."""


class OutcomeUnknownError(BrokenError):
    """Whoever decides was lost while deciding; what is on the drive tells what was decided."""


_BY_ERRNO: dict[int, type[BrokenError]] = {
    _errno.ENOENT: MissingFileError,
    _errno.EACCES: PermissionDeniedError,
    _errno.EPERM: PermissionDeniedError,
    _errno.EROFS: PermissionDeniedError,
    _errno.ENODATA: EndOfFileError,
    _errno.ENOSPC: NoSpaceError,
    _errno.EDQUOT: NoSpaceError,
    _errno.EFBIG: NoSpaceError,
}

_REMEDIES: dict[int, str] = {
    _errno.ENOSPC: "Free space on this file system, or use another folder",
    _errno.EDQUOT: "Raise the quota, or use another folder",
    _errno.EFBIG: "Raise the file size limit (ulimit -f), or use a file system with larger files",
    _errno.EACCES: "Use a folder that this user may write to",
    _errno.EPERM: "Use a folder that this user may write to",
    _errno.EROFS: "The file system is mounted read-only; use another folder",
    _errno.EIO: "The drive or file system reported an I/O error; see the kernel's log",
    _errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    _errno.ENOMEM: "Raise the memory limit (ulimit -v, ulimit -l) or ask for less",
    _errno.ENODATA: "The file is shorter than the range asked for",
}
