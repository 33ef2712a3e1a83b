"""Compiling the stand-ins, into a folder that is kept for each state of the sources."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Standin", "UnavailableError", "build", "find_installed"]

SOURCES = Path(__file__).parent / "sources"
FLAGS = ("-O1", "-g", "-fPIC", "-shared", "-std=gnu11", "-Wall", "-Wextra", "-Wl,-z,defs")


class UnavailableError(Exception):
    """The stand-ins can't be built or used here; the message says why."""


@dataclass(frozen=True)
class Standin:
    """The compiled libraries.

    Attributes
    ----------
    folder : Path
        Holds ``libcuda.so.1``; for ``LD_LIBRARY_PATH``.
    cufile : Path
        The stand-in for cuFile; for ``LD_PRELOAD``, since cuda.pathfinder prefers the wheel's copy
        to what ``LD_LIBRARY_PATH`` offers.
    modules : Path
        Gives the real libcufile an empty ``/proc/modules`` where there is none; for ``LD_PRELOAD``.
    """

    folder: Path
    cufile: Path
    modules: Path


@functools.cache
def build() -> Standin:
    """Return the compiled libraries, compiling them first if nobody has.

    Raises
    ------
    UnavailableError
        There is no gcc, a header is missing, or the compiler refused.
    """
    gcc = shutil.which("gcc")
    if gcc is None:
        raise UnavailableError("no gcc")
    headers = [find_installed("cuda.h"), find_installed("cufile.h")]
    key = _digest(headers)
    folder = _cache() / key
    if not folder.exists():
        _compile(gcc, {header.parent for header in headers}, folder)
    return Standin(folder, folder / "cufile" / "libcufile.so.0", folder / "modules.so")


def find_installed(name: str) -> Path:
    """Return a file of NVIDIA's wheels by its base name.

    Raises
    ------
    UnavailableError
        No installed wheel has it.
    """
    for distribution in importlib.metadata.distributions():
        if not (distribution.metadata["Name"] or "").startswith("nvidia-"):
            continue
        for file in distribution.files or ():
            if file.name == name and (path := Path(str(file.locate()))).exists():
                return path
    raise UnavailableError(f"no installed nvidia wheel has {name}")


def _digest(headers: list[Path]) -> str:
    """Return a name for what the result depends on."""
    state = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file()) + headers:
        state.update(path.name.encode())
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def _cache() -> Path:
    """Return the folder of all builds, ours alone: what lies there is loaded into processes."""
    root = Path(tempfile.gettempdir()) / f"tensorspill-standin-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if root.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UnavailableError(f"{root} belongs to someone else")
    return root


def _compile(gcc: str, includes: set[Path], folder: Path) -> None:
    """Compile into a folder of our own and move that into place, whole."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as name:
        target = Path(name, "built")
        (target / "cufile").mkdir(parents=True)
        command = [gcc, *FLAGS, *(f"-I{path}" for path in sorted(includes))]
        _library(command, "cuda", target / "libcuda.so.1")
        _library(command, "cufile", target / "cufile" / "libcufile.so.0")
        _run([*command, "-o", str(target / "modules.so"), str(SOURCES / "modules.c"), "-ldl"])
        try:
            target.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def _library(command: list[str], part: str, output: Path) -> None:
    sources = [SOURCES / "control.c", *sorted((SOURCES / part).glob("*.c"))]
    _run(
        [
            *command,
            "-fvisibility=hidden",
            f"-DSTANDIN_PREFIX=standin_{part}",
            f'-DSTANDIN_RULES_VARIABLE="STANDIN_{part.upper()}_RULES"',
            f"-Wl,-soname,{output.name}",
            "-o",
            str(output),
            *map(str, sources),
            "-ldl",
            "-lpthread",
        ]
    )


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise UnavailableError(f"gcc failed: {ended.stderr.strip()[-2000:]}")
