"""Checkpoints: each byte once, by the right writers, at the drives' speed, never half-committed.

`save`, `async_save` and `load` are for scripts that need nothing else; `Writer`, `Reader` and
`SavePlanner` for those that use torch.distributed.checkpoint; `FastFile` for those that stay with
`torch.save`. Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorspill.checkpoint.asynchronous import AsyncSave, async_save
    from tensorspill.checkpoint.dcp_planner import SavePlanner
    from tensorspill.checkpoint.dcp_reader import Reader
    from tensorspill.checkpoint.dcp_writer import Writer
    from tensorspill.checkpoint.distributed.limits import Limits
    from tensorspill.checkpoint.fast_file import FastFile
    from tensorspill.checkpoint.files.commit import latest
    from tensorspill.checkpoint.loading import LoadRecord, load
    from tensorspill.checkpoint.saving import SaveRecord, save
    from tensorspill.checkpoint.staging import Staging

__all__ = [
    "AsyncSave",
    "FastFile",
    "Limits",
    "LoadRecord",
    "Reader",
    "SavePlanner",
    "SaveRecord",
    "Staging",
    "Writer",
    "async_save",
    "latest",
    "load",
    "save",
]

_HOME = {
    "AsyncSave": "asynchronous",
    "FastFile": "fast_file",
    "Limits": "distributed.limits",
    "LoadRecord": "loading",
    "Reader": "dcp_reader",
    "SavePlanner": "dcp_planner",
    "SaveRecord": "saving",
    "Staging": "staging",
    "Writer": "dcp_writer",
    "async_save": "asynchronous",
    "latest": "files.commit",
    "load": "loading",
    "save": "saving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
