"""What all tests share: a header that says what this node can do, and the markers gpu and gds."""

import importlib.metadata
import os
import platform
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest

from tests.thorough import THOROUGH

#: Files whose few tests take long begin first, so that no process is left with one at the end.
FIRST = (
    "standin/test_lanes.py",
    "deepspeed_interface/test_jobs.py",
    "checkpoint/test_layouts.py",
    "host_fallback/device/test_standin.py",
    "gds/test_lanes.py",
    "checkpoint/test_failures.py",
    "checkpoint/test_training.py",
    "docs/test_site.py",
    "notebooks/test_notebooks.py",
)

# A slow drive or a busy machine must not fail a test, so examples have no deadline. Many more of
# them: pytest --hypothesis-profile=exhaustive
hypothesis.settings.register_profile("tensorspill", deadline=None, max_examples=10)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=100)
hypothesis.settings.register_profile("exhaustive", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("thorough" if os.environ.get(THOROUGH) else "tensorspill")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gds-dir",
        metavar="FOLDER",
        help="folder on a drive with GPUDirect Storage, for the tests marked gds",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="also run the tests marked thorough, and try more examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make runs alike: Ctrl-C is taken, and nothing that was tuned on this machine counts.

    A shell that started this run in its background may ignore Ctrl-C. Tests send it to themselves
    and to children, which would wait for ever for what never comes.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Whatever was tuned on this machine, defaults are what tests expect, in children too.
    os.environ["TENSORSPILL_TUNED"] = ""
    if config.getoption("--thorough"):
        os.environ[THOROUGH] = "1"
        if config.getoption("--hypothesis-profile", None) is None:
            hypothesis.settings.load_profile("thorough")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what this node can do; nothing here starts CUDA."""
    versions = ("torch", "numpy", "numba", "kvikio-cu12", "kvikio-cu13", "cuda-python")
    found = [f"{name} {version}" for name in versions if (version := _version(name))]
    return [
        f"node: Linux {platform.release()} {platform.machine()}, {_cores()} cores, "
        f"{'root' if os.geteuid() == 0 else 'not root'}",
        f"packages: {', '.join(found)}",
        f"files: {_direct(tempfile.gettempdir())}; Linux AIO: {_aio()}; FUSE: {_fuse()}",
        f"gpu: {_no_gpu() or 'yes'}; gds: {_no_gds(config) or 'yes'}",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this node can't run, saying why; begin with what takes longest."""
    unasked = None if os.environ.get(THOROUGH) else "only with --thorough"
    reasons = {"gpu": _no_gpu(), "gds": _no_gds(config), "thorough": unasked}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    """Return the place of a test's file; those of the same place keep their order."""
    name = item.path.as_posix()
    return next((n for n, first in enumerate(FIRST) if name.endswith(first)), len(FIRST))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _direct(folder: str) -> str:
    """Say whether files in `folder` can be opened past the page cache."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            return f"O_DIRECT refused in {folder} ({error.strerror})"
    return f"O_DIRECT in {folder}"


def _aio() -> str:
    try:
        used, limit = (Path(f"/proc/sys/fs/aio-{name}").read_text() for name in ("nr", "max-nr"))
    except OSError:
        return "unknown"
    return f"{int(used)} of {int(limit)} requests in use"


def _fuse() -> str:
    return "yes" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "no usable /dev/fuse"


def _no_gpu() -> str | None:
    """Return why there is no GPU to test with, or None if there is one."""
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA driver on this node"
    torch = _version("torch")
    if torch is None or "+cpu" in torch:
        return f"torch {torch} is a CPU build"
    return None


def _no_gds(config: pytest.Config) -> str | None:
    """Return why GPUDirect Storage can't be tested, or None if it can."""
    if reason := _no_gpu():
        return reason
    if not (_version("kvikio-cu12") or _version("kvikio-cu13")):
        return "kvikio is not installed"
    if config.getoption("--gds-dir") is None:
        return "no --gds-dir given"
    return None
