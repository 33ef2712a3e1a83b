"""gdsio and nvbandwidth, by programs that print what these do."""

import json
import sys

import pytest

from tensorspill.profiling.others import (
    gdsio_row,
    nvbandwidth_rows,
    parse_gdsio,
    parse_nvbandwidth,
)
from tensorspill.profiling.points import Point
from tensorspill.profiling.site import Site

MIB = 1 << 20
GDSIO = (
    "IoType: READ XferType: GPUD Threads: 4 DataSetSize: 10485760/10485760(KiB) IOSize: 1024(KiB) "
    "Throughput: 6.500000 GiB/sec, Avg_Latency: 601.5 usecs ops: 10240 total_time 1.5 secs"
)
NVBANDWIDTH = {
    "nvbandwidth": {
        "testcases": [
            {"name": "host_to_device_memcpy_ce", "sum": 55.6},
            {"name": "device_to_host_memcpy_ce", "sum": "54.1"},
        ]
    }
}


@pytest.fixture
def program(tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(name, output, status=0):
        text = f"#!{sys.executable}\nimport sys\nprint({output!r})\nsys.exit({status})\n"
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    return install


@pytest.fixture
def site(tmp_path):
    with Site(tmp_path, MIB) as site:
        yield site


POINT = Point(direction="read", total_bytes=MIB, device="cuda:1")


def test_rates_that_are_printed(program, site):
    program("gdsio", GDSIO)
    program("nvbandwidth", json.dumps(NVBANDWIDTH))
    row = gdsio_row(site, POINT)
    assert row.gbps_last_done == pytest.approx(6.5 * 1.073741824)
    assert row.gpu == "cuda:1"
    assert "-d 1 -w 1 -s 1048576 -i 1048576 -x 0 -I 0" in row.cmd
    assert [each.gbps_last_done for each in nvbandwidth_rows(site, POINT)] == [55.6, 54.1]


def test_failures_are_not_measured(program, site):
    program("gdsio", "no driver", 3)
    program("nvbandwidth", "what is this")
    rows = [gdsio_row(site, POINT), *nvbandwidth_rows(site, POINT)]
    assert not any(row.measured for row in rows)
    assert "ended with 3: no driver" in rows[0].path_taken
    assert "said no rate" in rows[1].path_taken


def test_forms():
    assert parse_gdsio("Throughput: 500 MB/sec") == pytest.approx(0.5)
    assert parse_gdsio("nothing") is None
    assert (
        parse_nvbandwidth("SUM host_to_device_memcpy_ce 55.64", "host_to_device_memcpy_ce") == 55.64
    )
    assert parse_nvbandwidth('{"nvbandwidth": []}', "x") is None
