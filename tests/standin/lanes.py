"""The ways to run a process on the stand-ins.

=============  ===================================================================================
``compat``     kvikio moves bytes itself, through POSIX and the driver's copies
``cufile``     kvikio calls cuFile, which is the stand-in
``real``       kvikio calls the real cuFile, in its own compatibility mode; in a private mount
               namespace with an entry of udev's for the drive, where the machine has none
=============  ===================================================================================
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.standin.build import Standin, UnavailableError, build

__all__ = ["LANES", "Lane", "lane"]

#: Tells a process, and the conformance suite in it, which lane it is in.
VARIABLE = "STANDIN_LANE"

LANES = ("compat", "cufile", "real")


@dataclass(frozen=True)
class Lane:
    """How to start a process in a lane.

    Attributes
    ----------
    name : str
        One of `LANES`.
    environment : mapping
        What to add to the environment.
    wrapper : tuple of str
        What to put before the command.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()


def lane(name: str) -> Lane:
    """Return a lane that works here.

    Raises
    ------
    UnavailableError
        gcc, headers or kvikio are missing, or the lane needs what this machine does not allow.
    """
    _check_kvikio()
    standin = build()
    environment = {
        VARIABLE: name,
        "LD_LIBRARY_PATH": _joined(str(standin.folder), os.environ.get("LD_LIBRARY_PATH")),
        "KVIKIO_COMPAT_MODE": "ON" if name == "compat" else "OFF",
        # Without a configuration, kvikio refuses to order cuFile's work by streams.
        "CUFILE_ENV_PATH_JSON": str(_configuration(standin)),
        "CUFILE_LOGFILE_PATH": os.devnull,
    }
    if name == "compat":
        return Lane(name, environment)
    if name == "cufile":
        return Lane(name, environment | {"LD_PRELOAD": str(standin.cufile)})
    if not Path("/proc/modules").exists():
        environment["LD_PRELOAD"] = str(standin.modules)
    wrapper = (sys.executable, "-m", "tests.standin.namespace")
    _check_namespace(wrapper)
    return Lane(name, environment, wrapper)


def _joined(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first


def _check_kvikio() -> None:
    for name in ("kvikio-cu13", "kvikio-cu12"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return
    raise UnavailableError("kvikio is not installed")


def _configuration(standin: Standin) -> Path:
    """Write a cufile.json that lets the real library work without nvidia-fs."""
    path = standin.folder / "cufile.json"
    if not path.exists():
        text = '{"logging": {"level": "ERROR"}, "properties": {"allow_compat_mode": true}}'
        with tempfile.NamedTemporaryFile("w", dir=standin.folder, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    return path


def _check_namespace(wrapper: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [*wrapper, sys.executable, "-c", ""],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    if ended.returncode:
        raise UnavailableError(ended.stderr.strip().splitlines()[-1])
