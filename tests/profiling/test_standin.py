"""Points of GPU memory, on the stand-in driver."""

import json

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import run_python
from tests.standin.lanes import lane

_POINTS = """
    import json, sys
    from tensorspill.profiling.bench import Bench
    from tensorspill.profiling.points import Point
    from tensorspill.profiling.site import Site

    MIB = 1 << 20
    with Site(sys.argv[1], 4 * MIB) as site:
        bench = Bench(site, 2)
        bench.run([
            Point(direction=way, total_bytes=3 * MIB, device="cuda:0", backend=backend,
                  tensor_bytes=each)
            for way in ("write", "read") for backend in ("aio", "gds") for each in (None, MIB)
        ] + [Point(direction="read", total_bytes=MIB, memory="pinned")])
    print(json.dumps([row.to_json() for row in bench.rows]))
"""


def test_gpu_memory_is_measured_by_both_engines(tmp_path):
    try:
        chosen = lane("cufile")
    except UnavailableError as error:
        pytest.skip(str(error))
    ended = run_python(chosen, _POINTS, str(tmp_path), flags=("-W", "error"))
    assert ended.returncode == 0, ended.errors
    *rows, pinned = json.loads(ended.output.splitlines()[-1])
    assert [row["engine"] for row in rows] == ["aio", "aio", "gds", "gds"] * 2
    assert all(row["verified"] and row["gbps_last_done"] > 0 for row in rows)
    assert all(row["gpu"].startswith("cuda:0 ") for row in rows)
    assert pinned["gbps_last_done"] > 0
    assert pinned["gpu"] is None
