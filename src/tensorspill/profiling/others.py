"""Other programs that measure the same: fio, NVIDIA's gdsio and nvbandwidth, where installed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from tensorspill.profiling.ceilings import Ceiling, per_cent, tightest
from tensorspill.profiling.fio import LEAN, FioJob, FioSample
from tensorspill.profiling.measuring import not_measured
from tensorspill.profiling.points import Point
from tensorspill.profiling.rows import Row
from tensorspill.profiling.site import Site

__all__ = ["fio_job", "fio_row", "gdsio_row", "nvbandwidth_rows"]

_TIMEOUT = 60.0
_GIB = 1 << 30
_SUMS = {"read": "host_to_device_memcpy_ce", "write": "device_to_host_memcpy_ce"}


def fio_job(site: Site, point: Point) -> FioJob:
    """Return fio's job for a point's pattern: the same file, block, depth, bytes and pages."""
    extra = LEAN if point.threads == 1 else (*LEAN, f"--numjobs={point.threads}")
    return FioJob(
        site.file,
        point.direction,
        point.total_bytes,
        block=point.block_bytes,
        depth=point.depth,
        extra=extra,
        huge_pages=point.memory != "small-pages",
    )


def fio_row(
    site: Site, point: Point, samples: Sequence[FioSample], ceilings: Sequence[Ceiling]
) -> Row:
    """Return the row of fio's rounds, at least one."""
    rates = [sample.gbps for sample in samples]
    rate, limit = statistics.median(rates), tightest(ceilings)
    tails = [sample.latencies for sample in samples if sample.latencies]
    middle = [statistics.median(column) for column in zip(*tails, strict=True)] if tails else []
    p50, p99, p999, _ = middle or (None, None, None, None)
    cpu = sum(sample.cpu or 0.0 for sample in samples)
    row = not_measured(site, point, "", "fio", shlex.join(fio_job(site, point).command()))
    return replace(
        row,
        path_taken="libaio",
        rounds=len(rates),
        gbps_first_done=rate,
        gbps_last_done=rate,
        gbps_stdev=statistics.stdev(rates) if len(rates) > 1 else 0.0,
        lat_us_p50=p50,
        lat_us_p99=p99,
        lat_us_p999=p999,
        lat_us_max=max((tail[-1] for tail in tails), default=None),
        cpu_pct=100 * cpu / sum(sample.seconds for sample in samples),
        pct_of_ceiling=per_cent(rate, limit),
        ceiling_name=None if limit is None else limit.name,
        o_direct=True,
        fsync=False,
        verified=False,
    )


def gdsio_row(site: Site, point: Point) -> Row:
    """Measure a point's pattern with gdsio, from and to the memory of the point's GPU."""
    index = point.device.partition(":")[2] or "0"
    command = [
        "gdsio", "-f", str(site.file), "-d", index, "-w", str(point.threads),
        "-s", str(point.total_bytes), "-i", str(point.block_bytes), "-x", "0",
        "-I", "0" if point.direction == "read" else "1",
    ]  # fmt: skip
    if point.direction == "write":
        site.dirty = True
    text, why = _output(command)
    rate = parse_gdsio(text) if not why else None
    cmd = shlex.join(command)
    if rate is None:
        return not_measured(site, point, why or "gdsio said no rate", "gdsio", cmd)
    row = not_measured(site, point, "", "gdsio", cmd)
    return replace(
        row,
        path_taken="GPUD",
        rounds=1,
        gbps_first_done=rate,
        gbps_last_done=rate,
        verified=False,
    )


def nvbandwidth_rows(site: Site, point: Point) -> list[Row]:
    """Measure copies between host and GPU with nvbandwidth, both ways."""
    command = ["nvbandwidth", "-j", "-t", *_SUMS.values()]
    text, why = _output(command)
    cmd, rows = shlex.join(command), []
    for direction, name in _SUMS.items():
        each = replace(point, direction=direction)
        rate = parse_nvbandwidth(text, name) if not why else None
        row = not_measured(site, each, why or "nvbandwidth said no rate", "nvbandwidth", cmd)
        # It copies between memories, whatever the drive is.
        row = replace(row, device=None, fs=None, block_bytes=None, depth=None, threads=None)
        if rate is not None:
            row = replace(row, path_taken="PCIe", rounds=1, total_bytes=None)
            row = replace(row, gbps_first_done=rate, gbps_last_done=rate)
        rows.append(row)
    return rows


def parse_gdsio(text: str) -> float | None:
    """Return the GB/s of gdsio's report, or None."""
    match = re.search(r"Throughput:\s*([0-9.]+)\s*([KMG]i?B)/sec", text)
    if match is None:
        return None
    step = 1024.0 if "i" in match[2] else 1000.0
    return float(float(match[1]) * step ** ("KMG".index(match[2][0]) + 1) / 1e9)


def parse_nvbandwidth(text: str, name: str) -> float | None:
    """Return the GB/s of one of nvbandwidth's test cases, or None."""
    sums: dict[str, float] = {}
    try:
        cases = json.loads(text[max(text.find("{"), 0) :])["nvbandwidth"]["testcases"]
        sums = {str(case["name"]): float(case["sum"]) for case in cases}
    except (ValueError, LookupError, TypeError):
        found = re.search(rf"SUM {name}\s+([0-9.]+)", text)
        sums = {name: float(found[1])} if found else {}
    return sums.get(name)


def _output(command: Sequence[str]) -> tuple[str, str]:
    """Return what a program printed, and why there is nothing."""
    if shutil.which(command[0]) is None:
        return "", f"{command[0]} is not installed"
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]}: {error}"
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip().splitlines()
        return "", f"{command[0]} ended with {ended.returncode}: {said[-1] if said else ''}"
    return ended.stdout, ""
