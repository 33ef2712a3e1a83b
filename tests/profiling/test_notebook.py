"""What notebooks get: transfers of all engines counted, ``%spill_stats``, a progress bar."""

import subprocess
import sys

import pytest
import torch

from tensorspill import Request, SpillFile, open_engine
from tensorspill.engine.watching import watching
from tensorspill.errors import EndOfFileError
from tensorspill.profiling.notebook import Moved, moved, progress

MIB = 1 << 20


def write(engine, name, nbytes):
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    with engine.open(name, "w", size=nbytes) as file:
        engine.submit([Request(data, file, write=True)]).result()
    return data


def test_transfers_of_all_engines_are_counted_while_it_lasts(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with open_engine(tmp_path / "a") as first, open_engine(tmp_path / "b") as second:
        write(first, "before", MIB)
        with moved() as counted:
            write(first, "x", 2 * MIB)
            data = write(second, "y", 3 * MIB)
            back = torch.full_like(data, 7)
            with second.open("y") as file:
                second.submit([Request(back, file)]).result()
        write(first, "after", MIB)
        expected = second.statistics()
    assert torch.equal(back, data)
    assert (counted.bytes_written, counted.bytes_read) == (5 * MIB, 3 * MIB)
    assert (counted.transfers, counted.failed) == (3, 0)
    folders = {folder for folder, _ in counted.by_path}
    assert folders == {str(tmp_path / "a"), str(tmp_path / "b")}
    ours = {path: s for (folder, path), s in counted.by_path.items() if folder.endswith("b")}
    # The second engine did nothing else, so that its own sums are the same.
    assert {p: s.nbytes for p, s in ours.items()} == {
        p: s.nbytes for p, s in expected.by_path.items()
    }
    assert sum(tail.count for tail in counted.latencies.values()) == sum(
        s.latencies.count for s in counted.by_path.values()
    )
    assert 0 < counted.busy <= counted.seconds


def test_transfers_of_engines_inside_of_the_library_are_counted(tmp_path):
    with moved() as counted, SpillFile(tmp_path, capacity="8MiB") as spill:
        spill.put({"a": torch.ones(MIB, dtype=torch.uint8)}).result()
    assert counted.bytes_written == MIB


def test_a_failed_transfer_counts_as_failed_and_moves_nothing(tmp_path):
    with open_engine(tmp_path) as engine:
        write(engine, "x", 4096)
        with engine.open("x") as file, moved() as counted:
            transfer = engine.submit([Request(torch.empty(8192, dtype=torch.uint8), file)])
            with pytest.raises(EndOfFileError):
                transfer.result()
    assert (counted.transfers, counted.failed, counted.bytes_read) == (1, 1, 0)
    assert "1 of them failed" in str(counted)


def test_an_engine_that_serves_another_is_not_counted_twice(tmp_path):
    with open_engine(tmp_path) as engine, moved() as counted:
        engine.serve()
        write(engine, "x", MIB)
        assert engine.statistics().bytes_written == MIB
    assert counted.transfers == 0
    assert "No transfer" in str(counted)


def test_a_watcher_that_fails_does_not_harm_a_transfer(tmp_path, caplog):
    def fail(_ended):
        raise RuntimeError("mine")

    with open_engine(tmp_path) as engine, watching(fail), moved() as counted:
        write(engine, "x", MIB)
    assert counted.bytes_written == MIB
    assert "watcher" in caplog.text


def test_what_was_moved_is_a_table_whose_texts_are_escaped(tmp_path):
    folder = tmp_path / "<script>"
    folder.mkdir()
    with open_engine(folder) as engine, moved() as counted:
        write(engine, "x", MIB)
    page = counted._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "1 MiB" in str(counted)
    assert repr(Moved()) == str(Moved())


CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
for _ in range(2):
    shell.run_line_magic("load_ext", "tensorspill")
    shell.run_line_magic("reload_ext", "tensorspill")
shell.run_cell("import torch, tensorspill")
cell = '''
%spill_stats
with tensorspill.SpillFile(FOLDER, capacity="8MiB") as spill:
    spill.put({"a": torch.ones(1 << 20, dtype=torch.uint8)}).result()
'''.replace("FOLDER", repr(sys.argv[1]))
shell.run_cell(cell)
print("next")
shell.run_cell(cell.replace("%spill_stats", ""))
print("raising")
shell.run_cell("%spill_stats\\n1 / 0")
print("arguments")
shell.run_cell("%spill_stats x")
"""


def test_the_magic_shows_one_cell_and_only_that(tmp_path):
    pytest.importorskip("IPython")
    done = subprocess.run(
        [sys.executable, "-c", CELLS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path / "i")},
    )
    assert done.returncode == 0, done.stderr
    first, rest = done.stdout.split("next\n")
    second, rest = rest.split("raising\n")
    third, fourth = rest.split("arguments\n")
    assert "0 B read and 1 MiB written in 1 transfers" in first
    assert first.count("written in") == 1
    assert "written" not in second
    assert "No transfer ended" in third
    assert "takes no arguments" in fourth


def test_the_bar_shows_what_is_done_and_what_comes_next(capsys):
    pytest.importorskip("tqdm")
    with progress(ascii=True, ncols=80) as tick:
        tick(0, 4, "first")
        tick(3, 4, "second")
    said = capsys.readouterr().err
    assert "75%" in said
    assert "second" in said
