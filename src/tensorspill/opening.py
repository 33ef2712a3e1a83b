"""Choosing and opening an engine."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch

from tensorspill.engine.engine import Engine
from tensorspill.engine.options import resolve
from tensorspill.engine.tuned import read_tuned, settings_path
from tensorspill.errors import SpillError, UnsupportedError

__all__ = ["Choice", "choose_engine", "device_key", "open_engine"]

log = logging.getLogger(__name__)

BACKENDS = ("auto", "aio", "gds")
VARIABLE = "TENSORSPILL_BACKEND"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which engine `open_engine` opens.

    Attributes
    ----------
    backend : {"aio", "gds"}
    device : torch.device
        With its number, if it is a GPU.
    why : str
        In one line.
    asked : bool
        Whether the user asked for it. Else files that GPUDirect Storage fails on go on by the host
        path.
    """

    backend: str
    device: torch.device
    why: str
    asked: bool = False


def open_engine(
    folder: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    backend: str = "auto",
    **options: Any,
) -> Engine:
    """Open an engine that moves tensors between `device` and files of `folder`.

    Parameters
    ----------
    folder : str or path
        An existing folder.
    device : str or torch.device
        Where the tensors are.
    backend : {"auto", "aio", "gds"}
        Which engine. "auto" takes GPUDirect Storage for a GPU if it was seen to work with this
        folder's file system, else the host path; `choose_engine` says why. ``TENSORSPILL_BACKEND``
        sets what "auto" means.
    **options
        Of the engine: for "aio" see `tensorspill.host_fallback.AioOptions`, and for GPUs
        `tensorspill.host_fallback.device.StagedOptions`; for "gds" `tensorspill.gds.GdsOptions`.
        What is not given comes from ``TENSORSPILL_<OPTION>``, else from what ``tensorspill tune``
        found for the device below the folder, else from the default; `Engine.statistics` says
        which. With "auto", an option that only one engine has chooses it.

    Raises
    ------
    UnsupportedError
        The backend is unknown or not available here, or an option is unknown or out of range.
    MissingFileError, PermissionDeniedError, BrokenError
        The folder can't be used.

    Examples
    --------
    >>> with open_engine("/mnt/nvme") as engine, engine.open("x", "w", size=4096) as file:
    ...     engine.submit([Request(tensor, file, write=True)]).result()  # doctest: +SKIP
    """
    choice = choose_engine(folder, device, backend, **options)
    if choice.device.type == "cpu":
        from tensorspill.host_fallback.engine import AioEngine
        from tensorspill.host_fallback.options import AioOptions

        tuned = _tuned(folder, "aio")
        return AioEngine(folder, choice.device, resolve(AioOptions, options, tuned))
    log.info("%s and %s: backend %r, %s", folder, choice.device, choice.backend, choice.why)
    if choice.backend == "aio":
        engine = _open_staged(folder, choice.device, options)
    else:
        engine = _open_gds(folder, choice, options)
    engine.note(choice.why)
    return engine


def choose_engine(
    folder: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    backend: str = "auto",
    **options: Any,
) -> Choice:
    """Say which engine `open_engine` opens for the same arguments, and why.

    Looks for a CUDA driver and kvikio, reads cufile.json, and the first time for a file system and
    a GPU tries GPUDirect Storage on a file of the folder, in another process.

    Raises
    ------
    UnsupportedError
        The backend is unknown, there is no such device, or an option belongs to an engine that
        can't be had.
    """
    asked, source = backend != "auto", "the argument"
    if not asked:
        backend = os.environ.get(VARIABLE, "auto")
        asked, source = backend != "auto", VARIABLE
    if backend not in BACKENDS:
        raise UnsupportedError(f"Backend {backend!r} is none of {', '.join(BACKENDS)}")
    target = torch.device(device)
    if target.type == "cpu":
        if backend == "gds":
            raise UnsupportedError(
                "There is no engine for cpu with backend 'gds': it moves GPU memory",
                remedy="Use backend='aio'",
            )
        return Choice("aio", target, "the tensors are in host memory", asked)
    if target.type != "cuda":
        raise UnsupportedError(
            f"There is no engine for {target}", remedy="Use a CPU or CUDA device"
        )
    if backend == "gds":
        _check_kvikio()
    from tensorspill.pool.cuda.contexts import normal_device

    target = normal_device(target)
    if asked:
        return Choice(backend, target, f"{source} asks for it", asked)
    return _choose(folder, target, {n for n, value in options.items() if value is not None})


def _check_kvikio() -> None:
    """Raise what keeps kvikio from being used at all, before anything about the device."""
    from tensorspill.gds.evidence import missing

    if (lacking := missing()) is not None:
        raise UnsupportedError(f"There is {lacking.why}", remedy=lacking.remedy)


def _choose(folder: str | os.PathLike[str], device: torch.device, given: set[str]) -> Choice:
    """Choose for a GPU, by the options given and by what works."""
    from tensorspill.gds.evidence import find
    from tensorspill.gds.options import GdsOptions
    from tensorspill.host_fallback.device.options import StagedOptions

    of_gds, of_host = (
        {field.name for field in dataclasses.fields(cls)} for cls in (GdsOptions, StagedOptions)
    )
    if unknown := sorted(given - of_gds - of_host):
        raise UnsupportedError(
            f"Unknown option {unknown[0]!r}; there are {', '.join(sorted(of_gds | of_host))}"
        )
    only_gds, only_host = sorted(given & of_gds - of_host), sorted(given & of_host - of_gds)
    if only_gds and only_host:
        raise UnsupportedError(
            f"Option {only_gds[0]} belongs to backend 'gds', and {only_host[0]} to 'aio'"
        )
    if only_host:
        return Choice("aio", device, f"only the host path has the option {only_host[0]}")
    found = find(folder, device.index)
    if found.works:
        return Choice("gds", device, found.why)
    if only_gds:
        raise UnsupportedError(
            f"Option {only_gds[0]} needs backend 'gds', and there is {found.why}",
            remedy=found.remedy or None,
        )
    return Choice("aio", device, found.why)


def _open_staged(
    folder: str | os.PathLike[str], device: torch.device, options: dict[str, Any]
) -> Engine:
    from tensorspill.host_fallback.device.engine import StagedEngine
    from tensorspill.host_fallback.device.options import StagedOptions

    tuned = _tuned(folder, "staged")
    return StagedEngine(folder, device, resolve(StagedOptions, options, tuned))


def _open_gds(folder: str | os.PathLike[str], choice: Choice, options: dict[str, Any]) -> Engine:
    from tensorspill.gds.engine import GdsEngine
    from tensorspill.gds.options import GdsOptions

    def host() -> Engine:
        # Sizes and numbers of threads that suit kvikio say nothing about the host path.
        return _open_staged(folder, choice.device, {"direct": options.get("direct")})

    resolved = resolve(GdsOptions, options, _tuned(folder, "gds"))
    return GdsEngine(folder, choice.device, resolved, None if choice.asked else host)


def device_key(folder: str | os.PathLike[str]) -> str:
    """Return what tuned settings are kept under: the machine, the device and its file system.

    Raises
    ------
    BrokenError
        The folder can't be looked at.
    """
    from tensorspill.topology.discovery.paths import device_of

    below = device_of(folder)
    return f"{socket.gethostname()}/{below.device or below.mount}/{below.filesystem}"


def _tuned(folder: str | os.PathLike[str], kind: str) -> dict[str, int]:
    """Return the settings that were measured for what is below a folder."""
    path = settings_path()
    # Without such a file, which is the usual case, nothing is looked up.
    if path is None or not os.path.exists(path):
        return {}
    try:
        return read_tuned(device_key(folder), kind)
    except SpillError as error:
        log.debug("No tuned settings for %s: %s", folder, error)
        return {}
