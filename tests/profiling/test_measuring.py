"""Points measured for real, on little data: what rows say, and wrong bytes are never a rate."""

import dataclasses
import errno
import os

import pytest

from tensorspill.errors import BrokenError, CorruptError, UnsupportedError
from tensorspill.profiling import fio
from tensorspill.profiling.bench import Bench, Comparison, round_bytes, standard_points
from tensorspill.profiling.measuring import Measuring, not_measured
from tensorspill.profiling.points import DIRECTIONS, Point
from tensorspill.profiling.rounds import Spread
from tensorspill.profiling.rows import NOT_MEASURED, read_results
from tensorspill.profiling.site import Site
from tensorspill.profiling.sweep import ResultsFile, grid
from tests.faults import Rule, faulty_file_system

MIB = 1 << 20
POINT = Point(direction="read", total_bytes=2 * MIB, block_bytes=256 << 10, depth=4)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with Site(tmp_path_factory.mktemp("site"), 4 * MIB) as site:
        yield site


def measure(site, point, rounds=2):
    with Measuring(site, point) as one:
        for number in range(rounds):
            one.round(last=number == rounds - 1)
        return one.row()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"threads": 2, "tensor_bytes": 128 << 10},
        {"memory": "ordinary"},
        {"memory": "small-pages"},
        {"tensor_bytes": 5000},
        {"total_bytes": 3 * MIB + 77},
        {"backend": "aio", "fsync": True},
    ],
)
def test_rows(site, direction, change):
    point = dataclasses.replace(POINT, direction=direction, **change)
    row = measure(site, point)
    assert (row.engine, row.direction, row.rounds) == ("aio", direction, 2)
    assert row.gbps_last_done > 0
    assert row.gbps_first_done > 0
    assert 0 < row.lat_us_p50 <= row.lat_us_p99 <= row.lat_us_p999 <= row.lat_us_max
    assert row.cpu_pct > 0
    assert row.verified
    assert row.fsync == (direction == "write" and (point.fsync or "buffered" in row.path_taken))
    assert (row.block_bytes, row.depth, row.threads) == (256 << 10, 4, point.threads)
    assert row.total_bytes == point.total_bytes
    assert row.device == site.storage.device
    assert row.path_taken
    assert read_back(row.cmd) == point


def read_back(command):
    """Return the point that a command measures."""
    import shlex

    from tensorspill.cli import _parser
    from tensorspill.commands.point_arguments import points_of

    arguments = _parser().parse_args(shlex.split(command)[1:])
    found = points_of(arguments, arguments.size)
    assert found is not None
    (point,) = found
    return point


def test_the_file_holds_what_was_written_last(site):
    measure(site, dataclasses.replace(POINT, direction="write"))
    site.check_file(site.nbytes)
    with site.file.open("r+b") as file:
        file.write(os.urandom(4096))
    site.dirty = True
    measure(site, POINT)
    site.check_file(site.nbytes)


def test_a_read_of_wrong_bytes_is_no_rate(site):
    with Measuring(site, POINT) as one:
        one.round()
        with site.file.open("r+b") as file:
            file.seek(MIB)
            byte = file.read(1)[0]
            file.seek(MIB)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(CorruptError):
            one.round()
    site.dirty = True


class Spoiling(Measuring):
    """Changes a byte of the file when it was written."""

    at = 0

    def _move(self, dropped):
        done = super()._move(dropped)
        with self._site.file.open("r+b") as file:
            file.seek(self.at)
            byte = file.read(1)[0]
            file.seek(self.at)
            file.write(bytes([byte ^ 1]))
        return done


def test_a_write_of_wrong_bytes_is_no_rate(site):
    point = dataclasses.replace(POINT, direction="write")
    with Spoiling(site, point) as one:
        with pytest.raises(CorruptError) as caught:
            one.round()
        assert caught.value.offset == 0
        one.at = MIB + 4097
        with pytest.raises(CorruptError):
            one.round(last=True)
    site.dirty = True


def test_what_this_machine_has_not_is_not_measured(site):
    bench = Bench(site, 1)
    bench.run([dataclasses.replace(POINT, device="cuda:77"), POINT])
    absent, present = bench.rows
    assert absent.path_taken.startswith(f"{NOT_MEASURED}: ")
    assert (absent.measured, absent.gbps_last_done, absent.rounds) == (False, None, 0)
    assert absent.gpu == "cuda:77"
    assert present.measured
    assert present.ceiling_name == "host copy"
    assert (present.pct_of_ceiling or 0) > 0
    with pytest.raises(UnsupportedError):
        Measuring(site, dataclasses.replace(POINT, backend="gds"))


def test_progress_is_told_in_order(site):
    told = []
    bench = Bench(site, 2, lambda done, total, text: told.append((done, total)))
    bench.run([POINT, dataclasses.replace(POINT, device="cuda:77")])
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == 7


@pytest.mark.skipif(not fio.available(), reason="fio is not installed")
def test_against_fio(site):
    bench = Bench(site, 2)
    for direction in DIRECTIONS:
        bench.run([], [dataclasses.replace(POINT, direction=direction, memory="small-pages")])
    assert [row.engine for row in bench.rows] == ["aio", "fio"] * 2
    assert bench.rows[1].cmd.startswith("fio --name=job")
    assert (bench.rows[1].lat_us_p99 or 0) > 0
    assert all(found.ratio is not None for found in bench.comparisons)
    assert all(found.close in (True, False) for found in bench.comparisons)
    # What fio left in the file is no content of ours, and a read must not see it.
    assert measure(site, POINT).verified


def test_without_fio_it_says_so(site, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    bench = Bench(site, 1)
    bench.run([], [POINT])
    bench.other_programs(POINT)
    assert [(row.engine, row.measured) for row in bench.rows] == [
        ("aio", True),
        ("fio", False),
        ("gdsio", False),
        ("gdsio", False),
        ("nvbandwidth", False),
        ("nvbandwidth", False),
    ]
    assert all("is not installed" in row.path_taken for row in bench.rows[1:])
    assert bench.comparisons[0].close is None
    assert "not installed" in bench.comparisons[0].why


@pytest.mark.parametrize(
    ("median", "noise", "close"), [(1.04, 0, True), (0.9, 0.02, False), (0.9, 0.15, True)]
)
def test_what_counts_as_equal_to_fio(median, noise, close):
    ratio = Spread(median, median, median, 9)
    assert Comparison("x", ratio, 0.0, Spread(1.0, 1 - noise, 1.0, 9)).close is close


def test_the_standard_points_differ(tmp_path):
    for quick in (True, False):
        compared, others = standard_points(64 * MIB, 128 * MIB, quick)
        assert len({*compared, *others}) == len(compared) + len(others)
        assert {point.direction for point in others} == set(DIRECTIONS)


def test_bytes_of_a_round(site):
    assert round_bytes(site, 1e-9, MIB) == MIB
    assert round_bytes(site, 1e9) == site.nbytes


def test_a_failing_drive_is_an_error_and_leaves_nothing(tmp_path):
    with faulty_file_system(tmp_path) as files:
        with Site(files.folder, 2 * MIB) as site, Measuring(site, POINT) as one:
            one.round()
            files.rules(Rule(error=errno.EIO))
            with pytest.raises(BrokenError) as caught:
                one.round()
            assert caught.value.errno == errno.EIO
            files.rules()
        assert list(files.behind.iterdir()) == []


def test_results_files_go_on_where_they_were_cut(site, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = measure(site, POINT, 1)
    with ResultsFile(path) as file:
        file.add(row, [1.0])
        file.add(dataclasses.replace(row, cmd="another"), [2.0])
    whole = path.read_bytes()
    for cut in (1, 5, 40):
        path.write_bytes(whole[:-cut])
        with ResultsFile(path) as file:
            assert file.has(row.cmd)
            file.add(row)
        found = read_results(path)
        assert found.notes == ()
        assert found.rows[-1] == row
        assert found.rounds[0] == (1.0,)
    path.write_bytes(b"something else\n")
    with pytest.raises(UnsupportedError):
        ResultsFile(path)
    assert path.read_bytes() == b"something else\n"
    with pytest.raises(BrokenError):
        ResultsFile(tmp_path / "missing" / "rows.jsonl")


def test_not_measured_rows_are_not_there_on_resuming(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = not_measured(None, POINT, "no GPU")
    with ResultsFile(path) as file:
        file.add(row)
    with ResultsFile(path) as file:
        assert not file.has(row.cmd)


def test_grids():
    found = grid(DIRECTIONS, MIB, block_bytes=(4096, 8192), depth=(1, 1, 2))
    assert len(found) == len(set(found)) == 8
    with pytest.raises(UnsupportedError):
        grid(("sideways",), MIB)
    with pytest.raises(UnsupportedError):
        Point(direction="read", total_bytes=0)
