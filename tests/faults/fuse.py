"""A file system that fails on demand, in a process of its own.

Needs the package mfusepy, libfuse3 and a usable ``/dev/fuse``; tests skip where these are missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.faulty_drive.rules import Rule, dump

__all__ = ["FaultyFileSystem", "faulty_file_system"]

ROOT = Path(__file__).parents[2]
#: What libfuse and the kernel say where a node does not let us mount; anything else is our fault.
REFUSALS = ("Unable to find libfuse", "not permitted", "Permission denied", "fusermount3")


class FaultyFileSystem:
    """A mounted file system whose faults are `rules`.

    Attributes
    ----------
    folder : Path
        Where it is mounted.
    behind : Path
        The folder that holds the files' bytes.
    """

    def __init__(self, folder: Path, behind: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.behind = behind
        self._process = process

    def rules(self, *rules: Rule) -> None:
        """Put these faults in place of those before; what is stalled goes on if none says so."""
        answer = self._ask(dump(rules))
        assert answer == "ok", answer

    def wait_for_stall(self, operations: int = 1, timeout: float = 30) -> None:
        """Wait until that many operations are stalled."""
        deadline = time.monotonic() + timeout
        while int(self._ask("?")) < operations:
            assert time.monotonic() < deadline, "nothing was stalled"
            time.sleep(0.005)

    def kill(self) -> None:
        """End the process of the file system without a word; every operation fails from then on."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def _ask(self, line: str) -> str:
        stdin, stdout = _pipe(self._process.stdin), _pipe(self._process.stdout)
        stdin.write(line + "\n")
        stdin.flush()
        return stdout.readline().strip()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@contextlib.contextmanager
def faulty_file_system(tmp_path: Path, synchronous: bool = False) -> Iterator[FaultyFileSystem]:
    """Mount a file system without faults so far, and unmount it in any case.

    If `synchronous`, ``io_submit`` waits for each operation, as on file systems without
    asynchronous direct I/O. Else the kernel turns a direct write that falls short into EIO.
    """
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no usable /dev/fuse")
    if importlib.util.find_spec("mfusepy") is None:
        pytest.skip("mfusepy is not installed")
    folder, behind = tmp_path / "faulty", tmp_path / "behind"
    folder.mkdir()
    behind.mkdir()
    process = _start(str(behind), str(folder), *(["--synchronous"] if synchronous else []))
    files = FaultyFileSystem(folder, behind, process)
    try:
        _wait_until_mounted(folder, process)
        yield files
    finally:
        if process.poll() is None:
            with contextlib.suppress(OSError):
                files.rules()
        _unmount(folder)
        _end(process)


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faulty_drive.process", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"FUSE_LIBRARY_NAME": "fuse3"},
    )


def _wait_until_mounted(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not os.path.ismount(folder):
        if process.poll() is not None:
            said = _pipe(process.stderr).read().strip()
            if any(refusal in said for refusal in REFUSALS):
                pytest.skip(f"FUSE is not possible here: {said.splitlines()[-1]}")
            raise RuntimeError(f"the faulty file system did not start: {said}")
        assert time.monotonic() < deadline, "the faulty file system was not mounted"
        time.sleep(0.005)


def _unmount(folder: Path) -> None:
    # Lazily: a test that failed may have left descriptors open.
    command = ["umount", "--lazy"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
    subprocess.run([*command, str(folder)], check=False, capture_output=True)


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            _pipe(pipe).close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)
