"""Choosing and opening an engine."""

from __future__ import annotations

import os
from typing import Any

import torch

from tensorspill.engine.engine import Engine
from tensorspill.engine.options import resolve
from tensorspill.errors import UnsupportedError

__all__ = ["open_engine"]

BACKENDS = ("auto", "aio", "gds")


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
        Which engine; "auto" takes the best that works here. ``TENSORSPILL_BACKEND`` sets what
        "auto" means.
    **options
        Of the engine; for "aio" see `tensorspill.host_fallback.AioOptions`. What is not given comes
        from ``TENSORSPILL_<OPTION>``, else from the default; `Engine.statistics` says which.

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
    if backend == "auto":
        backend = os.environ.get("TENSORSPILL_BACKEND", "auto")
    if backend not in BACKENDS:
        raise UnsupportedError(f"Backend {backend!r} is none of {', '.join(BACKENDS)}")
    target = torch.device(device)
    if backend == "gds" or target.type != "cpu":
        raise UnsupportedError(
            f"There is no engine for {target} with backend {backend!r} in this version",
            remedy="Use device='cpu' and backend='aio'",
        )
    from tensorspill.host_fallback.engine import AioEngine
    from tensorspill.host_fallback.options import AioOptions

    return AioEngine(folder, target, resolve(AioOptions, options))
