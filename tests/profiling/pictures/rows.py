"""Rows to draw, made up."""

import random

from tensorspill.profiling.rows import Row

KIB, MIB = 1 << 10, 1 << 20
BLOCKS = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
DEPTHS = (1, 4, 16, 64)


def row(block=MIB, depth=16, rate=2.0, direction="read", **changes):
    values = {
        "ts": "2026-01-01T00:00:00Z",
        "host": "node7",
        "commit": "0.1.0",
        "engine": "aio",
        "path_taken": "direct",
        "direction": direction,
        "device": "nvme0n1",
        "fs": "ext4",
        "block_bytes": block,
        "depth": depth,
        "threads": 1,
        "total_bytes": 64 * MIB,
        "rounds": 5,
        "gbps_first_done": rate,
        "gbps_last_done": rate,
        "gbps_stdev": 0.1 * rate if rate else None,
        "lat_us_p50": 100.0,
        "lat_us_p99": 400.0,
        "lat_us_p999": 900.0,
        "lat_us_max": 2000.0,
        "pct_of_ceiling": 100 * rate / 7.0 if rate else None,
        "ceiling_name": "PCIe link of nvme0n1",
        "o_direct": True,
        "cache_dropped": True,
        "verified": True,
        "cmd": f"tensorspill bench /mnt --direction {direction} --block {block} --depth {depth}"
        " --memory aligned",
    }
    return Row(**(values | changes))


def grid(direction="read", without=()):
    """Return rows of a grid whose rate grows with block and depth, up to 6 GB/s."""
    found = []
    for block in BLOCKS:
        for depth in DEPTHS:
            if (block, depth) not in without:
                rate = min(6.0, 6.0 * block * depth / (16 * MIB))
                found.append(row(block, depth, rate, direction))
    random.shuffle(found)
    return found
