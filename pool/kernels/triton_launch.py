"""Launching the Triton kernels: one launch a batch, on the current stream of its device."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.pool.kernels.tables import COLUMNS, cut

__all__ = ["KINDS", "attempt", "interpreted", "launch_cast", "launch_sums", "on_device", "why_not"]

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Words, or elements, that a program takes: `_LANES` at a time.
_LANES, _STEPS = 1024, 8
#: No kernel adds or multiplies floats; said so that no release warns of its own default.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

#: By the dtypes of source and target: the kernel's kind, and what it loads and stores.
KINDS: dict[tuple[torch.dtype, torch.dtype], tuple[str, str, str]] = {
    (torch.float32, torch.bfloat16): ("f32-bf16", "uint32", "uint16"),
    (torch.float32, torch.float16): ("f32-f16", "float32", "float16"),
    (torch.bfloat16, torch.float32): ("bf16-f32", "uint16", "uint32"),
    (torch.float16, torch.float32): ("f16-f32", "float16", "float32"),
}

_failed: list[str] = []
_failing = threading.Lock()


def why_not() -> str | None:
    """Return why Triton can't be used, or None if it can, as far as is known before it is tried."""
    if _failed:
        return _failed[0]
    return None if _installed() else "Triton is not installed"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter is on (``TRITON_INTERPRET=1``), which works on host memory."""
    # Triton itself knows best, but importing it takes a quarter of a second.
    if os.environ.get("TRITON_INTERPRET", "0") == "0" or why_not() is not None:
        return False
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def attempt(launch: Callable[[], Result], instead: Callable[[], Result]) -> Result:
    """Run `launch`; if Triton fails, say so once, and do it `instead` from then on.

    Triton builds a launcher with the machine's C compiler, which may be missing. A failure of the
    GPU itself shows again in what is done instead, and is raised there.
    """
    if why_not() is None:
        try:
            return launch()
        except Exception as error:
            with _failing:
                if not _failed:
                    _failed.append(f"Triton failed: {type(error).__name__}: {error}")
                    log.warning("%s; torch does its work from now on", _failed[0])
    return instead()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one, as torch and Triton want it for launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launch_sums(tensors: Sequence[torch.Tensor], sums: torch.Tensor) -> None:
    """Add the sums of mixed words of each tensor's bytes to `sums`, one launch for all.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Contiguous, on the device of `sums`.
    sums : torch.Tensor
        int64 zeros, one for each tensor.
    """
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    sizes = np.array([tensor.nbytes for tensor in tensors], np.int64)
    owners, starts, lengths = cut(sizes, _LANES * _STEPS * 8)
    rows = _rows(addresses[owners] + starts, lengths, starts // 8, owners)
    if len(rows):
        _kernels().add_words[(len(rows),)](
            _on(rows, sums.device), sums.view(torch.uint64), LANES=_LANES, STEPS=_STEPS, **_OPTIONS
        )


def launch_cast(
    kind: tuple[str, str, str], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> None:
    """Convert tensors into others of as many elements, one launch for all.

    Parameters
    ----------
    kind : tuple of str
        Of `KINDS`; all pairs have it.
    sources, targets : sequence of torch.Tensor
        Contiguous, on one device, at multiples of their item size.
    """
    name, loaded, stored = kind
    origins = np.array([tensor.data_ptr() for tensor in sources], np.int64)
    places = np.array([tensor.data_ptr() for tensor in targets], np.int64)
    sizes = np.array([tensor.numel() for tensor in targets], np.int64)
    owners, starts, lengths = cut(sizes, _LANES * _STEPS)
    rows = _rows(
        origins[owners] + starts * sources[0].dtype.itemsize,
        places[owners] + starts * targets[0].dtype.itemsize,
        lengths,
        owners,
    )
    if len(rows):
        types = importlib.import_module("triton.language")
        _kernels().cast_elements[(len(rows),)](
            _on(rows, targets[0].device),
            SOURCE=getattr(types, loaded),
            TARGET=getattr(types, stored),
            KIND=name,
            LANES=_LANES,
            STEPS=_STEPS,
            **_OPTIONS,
        )


def _rows(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(np.stack(columns, axis=1)).reshape(-1, COLUMNS)


def _on(rows: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return a table on a device; the copy is ordered with what follows on the current stream."""
    table = torch.from_numpy(rows)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("tensorspill.pool.kernels.triton_kernels")
