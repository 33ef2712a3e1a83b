"""Compiled kernels are cached where that is possible, and work where it is not."""

import subprocess
import sys
import textwrap
from pathlib import Path

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


def test_no_writable_place_for_a_cache_is_a_logged_working_case(tmp_path: Path):
    (tmp_path / "file").touch()
    output = run(tmp_path / "file" / "folder")
    assert output.count("NUMBA_CACHE_DIR") == 1
    assert "WARNING" in output
    assert output.splitlines()[-1].endswith("None")
