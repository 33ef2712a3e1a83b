import os
from pathlib import Path

import pytest

from tensorspill.host_fallback.alignment import find_alignment
from tests.faults import small_file_system


def direct(path: Path) -> int:
    path.touch()
    return os.open(path, os.O_RDWR | os.O_DIRECT)


def test_alignment_is_what_the_kernel_accepts(tmp_path: Path):
    fd = direct(tmp_path / "x")
    try:
        alignment = find_alignment(fd)
    finally:
        os.close(fd)
    if alignment is None:
        pytest.skip("no direct I/O in the temporary folder")
    assert alignment.memory >= 1
    assert alignment.offset >= 512
    assert alignment.source in ("statx", "sysfs", "probe", "assumed")


@pytest.mark.parametrize("sector", [512, 4096])
def test_the_sector_size_of_the_drive_is_found(tmp_path: Path, sector):
    with small_file_system(tmp_path, 8 << 20, sector=sector) as folder:
        fd = direct(folder / "x")
        try:
            alignment = find_alignment(fd)
        finally:
            os.close(fd)
    assert alignment is not None
    assert alignment.offset == sector
