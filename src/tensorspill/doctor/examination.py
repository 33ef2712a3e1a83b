"""Looking at a machine, layer by layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tensorspill.doctor import bus, direct, gpus, limits, storage
from tensorspill.doctor.children import Answer, ask
from tensorspill.doctor.row import Diagnosis, Row, guarded
from tensorspill.doctor.verdicts import verdicts
from tensorspill.errors import SpillError
from tensorspill.topology.discovery.finding import discover
from tensorspill.topology.discovery.paths import Storage, device_of
from tensorspill.topology.discovery.sysfs import Files

__all__ = ["LIMIT", "examine"]

#: Seconds that whatever may hang is given.
LIMIT = 60.0


def examine(
    path: str | os.PathLike[str] = ".", root: str = "/", *, device: int = 0, limit: float = LIMIT
) -> Diagnosis:
    """Return what this machine can do between the drives below a path and a GPU; never raises.

    Parameters
    ----------
    path : str or path
        The folder that files would be in. A file without a name is written there, and another to
        try GPUDirect Storage if there is a GPU; nothing stays behind.
    root : str
        Folder that holds ``sys`` and ``proc``; other than ``/``, nothing is tried.
    device : int
        Number of the GPU.
    limit : float
        Seconds that whatever may hang is given. The examination takes little longer.
    """
    place, here = _absolute(os.fspath(path)), _absolute(root) == "/"
    answers = _answers(place, device, limit) if here else {}
    files, tried, asked = Files(root), answers.get("path", {}), answers.get("gds", {})
    machine = discover(root, nvml=False, environ={})
    held = storage.storage_in(tried) if here else _held(place, root)
    if not here:
        tried = {"problem": "nothing is tried in a tree of another machine"}
    cuda = answers.get("cuda", {})
    looks: Mapping[str, Callable[[], Row]] = {
        "driver": partial(gpus.driver, files, cuda),
        "GPU": partial(gpus.gpu, machine, cuda),
        "kvikio": partial(direct.kvikio, asked, here),
        "cuFile": partial(direct.cufile, asked),
        "nvidia-fs or P2PDMA": partial(direct.route, files, asked, here),
        "cufile.json": partial(direct.configuration, files, here),
        "BAR1": partial(gpus.bar1, files, machine, cuda, asked),
        "IOMMU and ACS": partial(bus.translation, files, machine),
        "folder": partial(_folder, place, tried, here),
        "file system": partial(storage.file_system, held, tried),
        "block device": partial(storage.block_device, machine, held, tried),
        "O_DIRECT alignment": partial(storage.alignment, held, tried),
        "AIO limits": partial(limits.aio_limits, files, tried),
        "memlock": partial(limits.memlock, files),
        "huge pages": partial(limits.huge_pages, files),
    }
    rows = tuple(guarded(layer, look) for layer, look in looks.items())
    return Diagnosis(place, root, rows, verdicts(rows, asked, here))


def _absolute(path: str) -> str:
    """Return a real path; the path as it is where the current folder has gone, or for nonsense."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return path


def _answers(path: str, device: int, limit: float) -> dict[str, Answer]:
    """Try the folder and ask the driver; then, if there is a GPU, try the way between them."""
    questions = {"cuda": ["cuda_child"]}
    # The system has no such paths, nor such arguments.
    if "\0" not in path:
        questions["path"] = ["path_child", path]
    found = _asked(questions, limit)
    if "gpus" not in found["cuda"]:
        problem = found["cuda"].get("problem", "there is no GPU")
        return found | {"gds": {"problem": problem, "lacking": True}}
    if "path" not in found or found["path"].get("kind") != "folder":
        return found | {"gds": {"problem": "there is no folder to try it in"}}
    # The probe in this child gives up before the child itself is given up.
    return found | _asked({"gds": ["gds_child", path, str(device), str(limit / 2)]}, limit)


def _asked(questions: Mapping[str, Sequence[str]], limit: float) -> dict[str, Answer]:
    try:
        return ask(questions, limit)
    except Exception as error:  # no thread can be started, for example
        return {name: {"problem": f"{type(error).__name__}: {error}"} for name in questions}


def _held(path: str, root: str) -> Storage | None:
    try:
        return device_of(path, root)
    except SpillError:
        return None


def _folder(path: str, tried: Answer, here: bool) -> Row:
    if not here:
        return Row("", "unknown", f"{path}: {tried['problem']}")
    if not tried:
        return Row("", "no", f"{path!r} can't be a path", "Name a folder")
    return storage.folder(path, tried)
