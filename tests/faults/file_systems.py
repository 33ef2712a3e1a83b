"""Small file systems that fill up; mounting needs root, and tests skip where it is not allowed."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        pytest.skip(f"{command[0]} is not possible here: {ended.stderr.strip()}")


@contextlib.contextmanager
def small_file_system(tmp_path: Path, nbytes: int, sector: int = 512) -> Iterator[Path]:
    """Mount an ext4 file system of `nbytes` on a loop device with the given sector size."""
    image, folder = tmp_path / "image", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(nbytes + (4 << 20))
    folder.mkdir()
    try:
        _run("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", "-b", "4096", str(image))
    except FileNotFoundError:
        pytest.skip("mkfs.ext4 is not installed")
    loop = _attach(image, sector)
    try:
        _run("mount", loop, str(folder))
        try:
            yield folder
        finally:
            if folder.is_mount():  # or the test has unmounted it
                subprocess.run(["umount", "--lazy", str(folder)], check=True)
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)
        image.unlink()


def _attach(image: Path, sector: int) -> str:
    command = ["losetup", "--find", "--show", "--direct-io=on", f"--sector-size={sector}"]
    ended = subprocess.run([*command, str(image)], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        pytest.skip(f"no loop device here: {ended.stderr.strip()}")
    return ended.stdout.strip()
