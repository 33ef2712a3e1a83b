"""A file object for `torch.save` and `torch.load` that moves bytes past the page cache."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, BinaryIO, Self

from tensorspill.checkpoint.files.durable import sync_folder
from tensorspill.checkpoint.files.read_ahead import ReadAhead
from tensorspill.checkpoint.files.write_behind import WriteBehind, as_bytes
from tensorspill.engine.engine import Engine
from tensorspill.errors import BrokenError, ClosedError, UnsupportedError
from tensorspill.opening import open_engine
from tensorspill.pool.sizes import parse_bytes

__all__ = ["FastFile"]

log = logging.getLogger(__name__)

_BLOCK = 4096
_PEEK = 8192

#: Seconds for which nobody wrote to a file that a killed process left.
_LEFT_FOR = 60.0


class FastFile(BinaryIO):
    """An ordinary file, written behind and read ahead with O_DIRECT.

    ``torch.save(obj, f)`` and ``torch.load(f)`` use it like any other binary file, and the file
    has the ordinary format. A new file appears under its name when it is closed: until then, and
    after an error, what was there before stays. Then it is durable, as is its name.

    It is written from its start to its end, and may be read anywhere. For one thread at a time.

    Parameters
    ----------
    path : str or path
        Its folder must exist.
    mode : {"r", "w", "x"}
        Read; write, in place of what is there; write, and fail if something is there. "rb", "wb"
        and "xb" are the same.
    buffer_bytes : int or str
        Bytes of each buffer, a multiple of 4096.
    buffers : int
        How many; two at least.
    **options
        Of the engine, see `tensorspill.open_engine`.

    Raises
    ------
    MissingFileError, PermissionDeniedError, BrokenError
        The file can't be opened.
    UnsupportedError
        An argument is out of range.

    Examples
    --------
    >>> with FastFile("model.pt", "w") as f:
    ...     torch.save(model.state_dict(), f)  # doctest: +SKIP
    >>> with FastFile("model.pt") as f:
    ...     state = torch.load(f)  # doctest: +SKIP
    """

    _open = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        buffer_bytes: int | str = "8MiB",
        buffers: int = 4,
        **options: Any,
    ) -> None:
        self._name = os.path.abspath(os.fspath(path))
        self._mode = mode.replace("b", "") + "b"
        nbytes = parse_bytes(buffer_bytes)
        if self._mode not in ("rb", "wb", "xb"):
            raise UnsupportedError(f"Mode {mode!r} is none of r, w, x", path=path)
        if nbytes < _BLOCK or nbytes % _BLOCK or buffers < 2:
            raise UnsupportedError("There must be two buffers at least, of whole blocks of 4096")
        if self._mode == "xb" and os.path.lexists(self._name):
            raise BrokenError.from_errno(errno.EEXIST, "There is such a file", path=path)
        folder, base = os.path.split(self._name)
        if self._mode == "rb":
            # Copies to new memory are slow, and two threads do them in half the time.
            options.setdefault("threads", 2)
        self._engine: Engine = open_engine(folder, "cpu", "aio", **options)
        self._reader: ReadAhead | None = None
        self._writer: WriteBehind | None = None
        self._position = 0
        try:
            if self._mode == "rb":
                self._reader = ReadAhead(self._engine, base, nbytes, buffers)
            else:
                _remove_leftovers(folder, base)
                self._temporary = f".{base[:200]}.{secrets.token_hex(4)}.saving"
                self._writer = WriteBehind(self._engine, self._temporary, nbytes, buffers)
        except BaseException:
            self._engine.close()
            raise

        self._open = True

    @property
    def name(self) -> str:
        """Absolute path."""
        return self._name

    @property
    def mode(self) -> str:
        """One of "rb", "wb" and "xb"."""
        return self._mode

    # -- writing -------------------------------------------------------------------------------

    def write(self, data: Any) -> int:
        """Write bytes, or any object with the buffer protocol; return how many bytes it has.

        Raises
        ------
        BrokenError
            This write or an earlier one failed.
        UnsupportedError, ClosedError
            The file is open for reading; it is closed.
        """
        array = as_bytes(data)
        self._writing().write(array)
        return array.size

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write one after the other; raises as `write`."""
        for line in lines:
            self.write(line)

    def truncate(self, size: int | None = None) -> int:
        """Refuse: the file is as long as what was written.

        Raises
        ------
        io.UnsupportedOperation
            Always.
        """
        raise io.UnsupportedOperation(f"Can't truncate to {size}")

    def flush(self) -> None:
        """Do nothing: bytes are durable when the file is closed, and not before."""

    # -- reading -------------------------------------------------------------------------------

    def readinto(self, out: Any) -> int:
        """Read into a writable object with the buffer protocol; return how many bytes there were.

        Raises
        ------
        BrokenError
            The file can't be read.
        UnsupportedError, ClosedError
            The file is open for writing; it is closed.
        """
        count = self._reading().read(self._position, as_bytes(out))
        self._position += count
        return count

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next `size` bytes, or all there are; raises as `readinto`."""
        left = max(self._reading().size - self._position, 0)
        out = bytearray(left if size is None or size < 0 else min(size, left))
        self.readinto(out)
        return bytes(out)

    def peek(self, size: int = _PEEK) -> bytes:
        """Return the next `size` bytes without going on; raises as `readinto`."""
        before = self._position
        try:
            return self.read(max(size, 1))
        finally:
            self._position = before

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return bytes up to the next newline, `size` at most; raises as `readinto`."""
        line = bytearray()
        limit = None if size is None or size < 0 else size
        while limit is None or len(line) < limit:
            found = self.peek()
            if limit is not None:
                found = found[: limit - len(line)]
            end = found.find(b"\n") + 1
            part = found[:end] if end else found
            line += part
            self._position += len(part)
            if end or not part:
                break
        return bytes(line)

    def readlines(self, hint: int = -1) -> list[bytes]:
        """Return the lines that follow, about `hint` bytes if that is positive."""
        lines, held = [], 0
        for line in self:
            lines.append(line)
            held += len(line)
            if 0 < hint <= held:
                break
        return lines

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place; return it.

        Raises
        ------
        UnsupportedError
            The file is open for writing, and that is not where it is; or the place is negative.
        ClosedError
            The file is closed.
        """
        self._check_open()
        end = self._position if self._reader is None else self._reader.size
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: end}.get(whence)
        place = None if base is None else base + offset
        if place is None or place < 0 or (self._writer is not None and place != self.tell()):
            raise UnsupportedError("The file can't go there", path=self._name, offset=place)
        self._position = place
        return place

    def tell(self) -> int:
        """Return where the file is."""
        self._check_open()
        return self._position if self._writer is None else self._writer.position

    def readable(self) -> bool:
        """Whether it may be read."""
        return self._reader is not None

    def writable(self) -> bool:
        """Whether it may be written."""
        return self._writer is not None

    def seekable(self) -> bool:
        """Whether it may go to any place."""
        return self._reader is not None

    def isatty(self) -> bool:
        """Whether it is a terminal: never."""
        return False

    def fileno(self) -> int:
        """Refuse: what is written or read behind this object's back would be wrong.

        Raises
        ------
        io.UnsupportedOperation
            Always.
        """
        raise io.UnsupportedOperation("A FastFile has no descriptor to share")

    # -- the end -------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return not self._open

    def close(self) -> None:
        """Write the rest, make file and name durable; a second time does no harm.

        Raises
        ------
        BrokenError
            Something could not be written; under its name is what was there before.
        """
        if self.closed:
            return
        if self._writer is None:
            self._end()
            return
        try:
            self._writer.finish()
            self._appear()
        except BaseException:
            self.abandon()
            raise
        self._end()
        sync_folder(os.path.dirname(self._name))

    def abandon(self) -> None:
        """Close the file and forget what was written; a second time does no harm."""
        if self.closed:
            return
        if self._writer is not None:
            self._writer.close()
            try:
                self._engine.remove(self._temporary)
            except BrokenError:
                pass
        self._end()

    def _appear(self) -> None:
        folder = os.path.dirname(self._name)
        temporary = os.path.join(folder, self._temporary)
        try:
            if self._mode == "xb":
                os.link(temporary, self._name)
                os.unlink(temporary)
            else:
                os.replace(temporary, self._name)
        except OSError as error:
            raise BrokenError.from_oserror(
                error, "The file can't have its name", path=self._name
            ) from error

    def _end(self) -> None:
        self._open = False
        for part in (self._reader, self._writer):
            if part is not None:
                part.close()
        self._engine.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("The file is closed", path=self._name)

    def _writing(self) -> WriteBehind:
        self._check_open()
        if self._writer is None:
            raise UnsupportedError("The file is open for reading", path=self._name)
        return self._writer

    def _reading(self) -> ReadAhead:
        self._check_open()
        if self._reader is None:
            raise UnsupportedError("The file is open for writing", path=self._name)
        return self._reader

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def __repr__(self) -> str:
        return f"<FastFile {self._name!r} mode={self._mode!r}{' closed' if self.closed else ''}>"


def _remove_leftovers(folder: str, base: str) -> None:
    """Remove what killed processes left of files of this name: ours, unlocked, and not new."""
    leftover = re.compile(rf"\.{re.escape(base[:200])}\.[0-9a-f]{{8}}\.saving")
    for name in filter(leftover.fullmatch, os.listdir(folder)):
        path = os.path.join(folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found = os.fstat(fd)
            # Between its making and its locking a file of a living process looks like a leftover.
            old = time.time() - found.st_mtime > _LEFT_FOR
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and old:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
        except OSError as error:
            log.info("Left %s where it is: %s", path, error)
        finally:
            os.close(fd)
