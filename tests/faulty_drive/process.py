"""The process of a faulty file system: passes operations on to a folder, except where rules say.

    python -m tests.faulty_drive.process FOLDER MOUNTPOINT [--synchronous]

Each line on standard input replaces the rules (see `rules`) and is answered with "ok"; "?" is
answered with the number of operations that are stalled. At the end of the input the file system is
unmounted, so that it never outlives the tests.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from typing import Any

import mfusepy

from tests.faulty_drive.rules import Rule, load

#: ``FUSE_CAP_ASYNC_DIO`` of libfuse's fuse_common.h.
ASYNC_DIO = 1 << 15


class FaultyFiles:
    """The operations of one flat folder."""

    use_ns = True

    def __init__(self, folder: str, synchronous: bool) -> None:
        self._folder = folder
        self._synchronous = synchronous
        self._rules: tuple[Rule, ...] = ()
        self._changed = threading.Condition()
        self._stalled = 0
        self._direct: dict[int, bool] = {}

    # -- control -------------------------------------------------------------------------------

    def obey(self, line: str) -> str:
        """Carry out a line of control and return the answer."""
        with self._changed:
            if line == "?":
                return str(self._stalled)
            self._rules = load(line)
            self._changed.notify_all()
            return "ok"

    def _rule(self, path: str, op: str, direct: bool, end: int) -> Rule | None:
        """Return the rule for an operation, after any stall."""
        with self._changed:
            while True:
                rules = (r for r in self._rules if r.concerns(path[1:], op, direct, end))
                rule = next(rules, None)
                if rule is None or not rule.stall:
                    return rule
                self._stalled += 1
                self._changed.wait()
                self._stalled -= 1

    def _allowed(self, path: str, op: str, fh: int, offset: int, size: int) -> int:
        """Return how many bytes of an operation to move; raise if the rules say so."""
        direct = self._direct.get(fh, False)
        rule = self._rule(path, op, direct, offset + size)
        if rule is None:
            return size
        if rule.multiple and (offset % rule.multiple or size % rule.multiple):
            raise OSError(errno.EINVAL, "misaligned")
        if rule.error:
            # The kernel makes an error of any short write that is direct and asynchronous.
            if op == "write" and offset < rule.begin and not direct:
                return rule.begin - offset
            raise OSError(rule.error, os.strerror(rule.error))
        return min(size, rule.shorten) if rule.shorten else size

    # -- operations ------------------------------------------------------------------------------

    def init_with_config(self, connection: Any, config: Any) -> None:
        # More than the depth of an engine, so that one stalled file does not hold up the others.
        connection.max_background = 256
        connection.congestion_threshold = 256
        if self._synchronous:
            connection.want &= ~ASYNC_DIO

    def _real(self, path: str) -> str:
        return self._folder + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        found = os.lstat(self._real(path))
        names = ("mode", "ino", "nlink", "uid", "gid", "size", "blocks")
        return {f"st_{name}": getattr(found, f"st_{name}") for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def open(self, path: str, flags: int) -> int:
        direct = bool(flags & os.O_DIRECT)
        self._allowed(path, "open", -1, 0, 0)
        fd = os.open(self._real(path), flags & ~(os.O_DIRECT | os.O_APPEND | os.O_NOFOLLOW))
        self._direct[fd] = direct
        return fd

    def create(self, path: str, mode: int, flags: int) -> int:
        self._allowed(path, "open", -1, 0, 0)
        fd = os.open(self._real(path), flags & ~os.O_DIRECT | os.O_CREAT, mode)
        self._direct[fd] = bool(flags & os.O_DIRECT)
        return fd

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, self._allowed(path, "read", fh, offset, size), offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        size = self._allowed(path, "write", fh, offset, len(data))
        return os.pwrite(fh, data[:size], offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._real(path), length)

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> None:
        self._allowed(path, "fallocate", fh, offset, size)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only plain fallocate")
        os.posix_fallocate(fh, offset, size)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._allowed(path, "fsync", fh, 0, 0)
        os.fsync(fh)

    def unlink(self, path: str) -> None:
        os.unlink(self._real(path))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._real(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._real(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._real(old), self._real(new))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._real(path), mode)

    def release(self, path: str, fh: int) -> None:
        self._direct.pop(fh, None)
        os.close(fh)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real(path))
        names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree")
        return {name: getattr(found, name) for name in names}


def main() -> None:
    folder, mountpoint, *options = sys.argv[1:]
    files = FaultyFiles(folder, "--synchronous" in options)

    def control() -> None:
        for line in sys.stdin:
            sys.stdout.write(files.obey(line.strip()) + "\n")
            sys.stdout.flush()
        files.obey("[]")
        subprocess.run(["umount", "--lazy", mountpoint], check=False, capture_output=True)

    threading.Thread(target=control, daemon=True).start()
    # Past the page cache for every descriptor, so that each operation arrives here as it was asked.
    mfusepy.FUSE(files, mountpoint, foreground=True, direct_io=True, fsname="faulty")


if __name__ == "__main__":
    main()
