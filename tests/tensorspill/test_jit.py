"""Compiled kernels are cached where that is possible, and work where it is not."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import logging, sys
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    from tensorspill.pool import digest
    from tensorspill.jit import cache_folder
    print(digest(b"some bytes"), cache_folder())
"""


def run(cache: Path) -> str:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    environment = {"NUMBA_CACHE_DIR": str(cache), "PATH": ""}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    return ended.stdout


def test_kernels_are_cached_by_the_state_of_the_sources(tmp_path: Path):
    output = run(tmp_path)
    assert "WARNING" not in output
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("tensorspill-")
    assert list(folder.rglob("*.nbc"))
    assert run(tmp_path) == output


@pytest.mark.thorough
def test_no_writable_place_for_a_cache_is_a_logged_working_case(tmp_path: Path):
    (tmp_path / "file").touch()
    output = run(tmp_path / "file" / "folder")
    assert output.count("NUMBA_CACHE_DIR") == 1
    assert "WARNING" in output
    assert output.splitlines()[-1].endswith("None")


@pytest.mark.thorough
def test_no_room_for_the_cache_is_a_logged_working_case(tmp_path: Path):
    """A cache that can be opened but not written: the file size limit stands for a full disk."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1))\n"
    command = [sys.executable, "-c", limited + textwrap.dedent(SCRIPT)]
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": ""}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert "could not be cached" in ended.stdout
    assert ended.stdout.splitlines()[-1].split()[0].isdigit()
