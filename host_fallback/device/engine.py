"""The engine for CUDA tensors on a host path: GPU memory, page-locked blocks, AIO."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from types import MappingProxyType
from typing import Any, cast

import torch

from tensorspill.engine.batch import Batch
from tensorspill.engine.engine import Engine
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.options import Resolved
from tensorspill.engine.statistics import EngineStatistics, PathStatistics
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import UnsupportedError
from tensorspill.host_fallback.device.file import StagedFile
from tensorspill.host_fallback.device.options import StagedOptions
from tensorspill.host_fallback.device.stager import Stager
from tensorspill.host_fallback.device.work import PREFIX
from tensorspill.host_fallback.engine import AioEngine
from tensorspill.host_fallback.options import AioOptions
from tensorspill.pool.cuda.contexts import normal_device

__all__ = ["StagedEngine"]

_CPU = torch.device("cpu")


class StagedEngine(Engine):
    """Moves GPU memory through page-locked blocks and the AIO engine, disk and PCIe at a time.

    Works on every node with an NVIDIA driver and cuda-python, whatever the file system. Copies run
    on streams of the engine's own, after what the caller's stream had when a batch was submitted.
    Small tensors share a block and are copied in one call of the driver.

    Parameters
    ----------
    folder : str or path
        Must exist.
    device : str or torch.device
        The GPU.
    options : Resolved of StagedOptions

    Raises
    ------
    UnsupportedError
        There is no driver, no cuda-python, or no such GPU.
    BrokenError
        The folder can't be used.
    """

    name = "aio"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        device: str | torch.device,
        options: Resolved[StagedOptions],
    ) -> None:
        super().__init__(folder, normal_device(device), options)
        self._inner = AioEngine(folder, _CPU, cast(Resolved[AioOptions], options))
        self._inner.serve()
        index = self.device.index
        self._stager = Stager(index, options.values, self._ledger, self._inner)
        self._finalizer = weakref.finalize(
            self, _shut_down, self._ledger, self._stager, self._inner
        )

    def _open(self, name: str, flags: int, size: int | None) -> StagedFile:
        inner = self._inner._open(name, flags, size)
        block = self.options.values.staging_block
        if block % inner.granule:
            inner.close()
            raise UnsupportedError(
                f"staging_block must be a multiple of this file system's {inner.granule} bytes, "
                f"not {block}",
                path=inner.path,
            )
        return StagedFile(inner, self._ledger)

    def _start(self, batch: Batch, transfer: Transfer) -> None:
        for file in cast(tuple[StagedFile, ...], batch.files):
            file.inner.exclusive = file.exclusive
        try:
            self._stager.start()
        except BaseException as error:
            self._ledger.end(transfer, error, {})
            raise
        self._stager.put(batch, transfer)

    def _release(self) -> None:
        self._finalizer()

    def _extra(self) -> dict[str, Any]:
        inner = self._inner.statistics()
        return {"staging_bytes": self._stager.staging_bytes + inner.staging_bytes}

    def statistics(self) -> EngineStatistics:
        """Return what the engine has done so far; works after `close` as well.

        Each byte counts once, under ``staged-device/`` and how the host path moved it; the copies
        between GPU and host are ``staged-device/copy``, with their bytes in `io_bytes` alone.
        """
        own, inner = super().statistics(), self._inner.statistics()
        paths = {
            PREFIX + path: dataclasses.replace(
                moved, why=f"GPU memory, through page-locked blocks; on the host: {moved.why}"
            )
            for path, moved in inner.by_path.items()
        }
        copied: PathStatistics | None = self._stager.meter.statistics()
        if copied is not None:
            paths[PREFIX + "copy"] = copied
        notes = (*own.notes, *inner.notes)
        return dataclasses.replace(own, by_path=MappingProxyType(paths), notes=notes)


def _shut_down(ledger: Ledger, stager: Stager, inner: AioEngine) -> None:
    """Drain and stop, also when the engine is collected or the interpreter ends."""
    if ledger.forked:
        return
    if stager.is_current:
        # Collected in a thread that can't wait for itself.
        threading.Thread(target=_shut_down, args=(ledger, stager, inner)).start()
        return
    ledger.close()
    ledger.wait_idle()
    stager.stop()
    inner.close()
