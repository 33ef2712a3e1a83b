"""Runs of fio, the yardstick: what the drive gives a program that does nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorspill.profiling.clock import Sample

__all__ = ["LEAN", "FioError", "FioJob", "FioSample", "available", "run_fio", "version"]

#: What fio can leave away: a process of its own, changing the content for each write, and dropping
#: the file's cached pages first.
LEAN = ("--thread", "--scramble_buffers=0", "--invalidate=0")

#: Kept out of every run, since they only cost time outside the measured part.
_QUIET = ("--disk_util=0", "--eta=never", "--fallocate=none", "--output-format=json")

_HUGE_PAGES = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"

_TIMEOUT = 300.0
_GRACE = 3.0


class FioError(RuntimeError):
    """fio was there and failed."""


@dataclass(frozen=True, slots=True)
class FioSample(Sample):
    """What one run of fio took.

    Attributes
    ----------
    latencies : tuple of float
        Of the operations, in microseconds: median, 99th and 99.9th percentile, largest; empty if
        the report does not say.
    """

    latencies: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FioJob:
    """One job on an existing file, by libaio with O_DIRECT.

    Attributes
    ----------
    path : Path
        The file; at least `region` bytes long, or fio makes it longer.
    rw : str
        "read", "write", "randread", "randwrite", or "rw" for both, see ``--rwmixread``.
    nbytes : int
        Bytes to move.
    block, depth : int
        Bytes of an operation, and operations under way.
    region : int, optional
        Bytes of the file in which they lie; `nbytes` if not given.
    extra : tuple of str
        More arguments.
    huge_pages : bool
        Whether fio's own memory is in huge pages, as glibc 2.35 and later can do. Left alone it is
        not, and a drive then moves hundreds of pieces for each operation.
    marks : tuple of Path, optional
        Two files that are touched right before the job's first operation and after its last.
    """

    path: Path
    rw: str
    nbytes: int
    block: int = 1 << 20
    depth: int = 32
    region: int | None = None
    extra: tuple[str, ...] = ()
    huge_pages: bool = False
    marks: tuple[Path, Path] | None = None

    def command(self) -> list[str]:
        """Return the command line."""
        arguments = [
            *(("env", _HUGE_PAGES) if self.huge_pages else ()),
            "fio",
            "--name=job",
            f"--filename={self.path}",
            f"--rw={self.rw}",
            f"--bs={self.block}",
            f"--iodepth={self.depth}",
            f"--size={self.region or self.nbytes}",
            f"--io_size={self.nbytes}",
            "--ioengine=libaio",
            "--direct=1",
            *_QUIET,
            *self.extra,
        ]
        if self.marks is not None:
            before, after = self.marks
            arguments += [f"--exec_prerun=touch {before}", f"--exec_postrun=touch {after}"]
        return arguments


def available() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


def version() -> str | None:
    """Return what fio calls itself, or None if it is not installed."""
    if not available():
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def run_fio(job: FioJob) -> FioSample | None:
    """Run a job; return its own seconds and CPU seconds, without fio's start and report.

    Returns
    -------
    FioSample or None
        None if fio is not installed.

    Raises
    ------
    FioError
        It failed, or moved another number of bytes.
    """
    if not available():
        return None
    result = parse(_output(job))
    if result.nbytes != job.nbytes:
        raise FioError(f"fio moved {result.nbytes} bytes instead of {job.nbytes}")
    return result


def parse(output: str) -> FioSample:
    """Read a report of one job.

    Raises
    ------
    FioError
        There is no report, or it tells of an error.
    """
    # fio writes warnings and the notice of exec_prerun before the report.
    start = output.find("{")
    try:
        job: dict[str, Any] = json.loads(output[max(start, 0) :])["jobs"][0]
    except (ValueError, LookupError) as error:
        raise FioError(f"No report from fio: {output[:500]!r}") from error
    if job["error"]:
        raise FioError(f"fio failed: {os.strerror(job['error'])}")
    moved = max(job["read"], job["write"], key=lambda way: int(way["io_bytes"]))
    # Of a mix both have moved some.
    nbytes = int(job["read"]["io_bytes"]) + int(job["write"]["io_bytes"])
    # In whole milliseconds: runs must take many of them.
    seconds = max(job["read"]["runtime"], job["write"]["runtime"], 1) / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return FioSample(seconds, nbytes, cpu, latencies=_latencies(moved))


def _latencies(moved: dict[str, Any]) -> tuple[float, ...]:
    found = moved.get("clat_ns", {})
    shares = found.get("percentile", {})
    wanted = [shares.get(f"{share:.6f}") for share in (50, 99, 99.9)] + [found.get("max")]
    return () if None in wanted else tuple(float(value) / 1e3 for value in wanted)


def _output(job: FioJob) -> str:
    """Run fio beside the file; whatever happens, it does not outlive this call."""
    process = subprocess.Popen(
        job.command(),
        cwd=job.path.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, complaints = process.communicate(timeout=_TIMEOUT)
    except BaseException:
        # Asked nicely first, it takes its own children along.
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if process.returncode:
        raise FioError(f"fio ended with {process.returncode}: {_complaint(complaints, output)}")
    return output


def _complaint(complaints: str, output: str) -> str:
    """Return why fio failed, in one line; its report names an errno among hundreds of figures."""
    if not complaints.strip():
        try:
            parse(output)
        except FioError as error:
            complaints = str(error)
    return " ".join((complaints.strip() or "it does not say why").split())[:300]
