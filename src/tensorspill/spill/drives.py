"""The drives of a spill file: one folder, engine and file each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from tensorspill.engine.batch import Batch
from tensorspill.engine.engine import Engine
from tensorspill.engine.file import File
from tensorspill.engine.request import Request
from tensorspill.errors import BrokenError, NoSpaceError, UnsupportedError
from tensorspill.opening import open_engine
from tensorspill.spill.folder import Claim, SpillFolder
from tensorspill.spill.plans import Plan
from tensorspill.spill.space import Growth, Space

__all__ = ["OpenDrive", "open_drives", "prepare"]

BLOCK = 4096

#: A file is never shorter, so that an engine can find out what its file system demands.
SHORTEST = 64 << 10

_offset = attrgetter("offset")


@dataclass(frozen=True, slots=True, eq=False)
class OpenDrive:
    """One drive's share of a spill file."""

    claim: Claim
    engine: Engine
    file: File

    @property
    def alignments(self) -> tuple[int, int]:
        """Alignment of extents in the file, and of memory that is worth moving without a copy."""
        memory = 1 if self.file.copies_cheaply else self.file.memory_alignment
        return max(self.file.granule, BLOCK), memory

    @property
    def stripe(self) -> int:
        """Smallest part of a tensor that is worth an operation of its own."""
        return int(getattr(self.engine.options.values, "block_bytes", 1 << 20))

    def grow(self, growth: Growth) -> int:
        """Make the file longer, as much as is wished for or as is needed; return its new length.

        Raises
        ------
        NoSpaceError
            The file system has no room; the file is as it was.
        BrokenError
            It failed otherwise.
        """
        for size in dict.fromkeys((growth.wanted, growth.needed)):
            try:
                # Opening preallocates; it is the one way that every engine has.
                self.engine.open(self.claim.name, "r+", size).close()
            except NoSpaceError as error:
                refused = error
            else:
                return size
        raise refused

    def close(self) -> None:
        """Close the engine and remove the file."""
        self.engine.close()
        self.claim.release()


def open_drives(
    folders: Sequence[str | os.PathLike[str]],
    capacity: int | None,
    device: str | torch.device,
    backend: str,
    options: dict[str, Any],
) -> tuple[list[OpenDrive], Space]:
    """Claim and open a file in each place, and make the space that they are; all or none.

    Raises
    ------
    SpillError
        As `SpillFolder`, `open_engine` and `Engine.open` do.
    """
    if not folders:
        raise UnsupportedError("A spill file needs at least one folder")
    places = [os.path.realpath(folder) for folder in folders]
    if len(set(places)) < len(places):
        raise UnsupportedError("A folder is named twice", path=max(places, key=places.count))
    with contextlib.ExitStack() as stack:
        drives = []
        for folder in folders:
            drive = _open_drive(folder, device, backend, options)
            stack.callback(drive.close)
            drives.append(drive)
        stripe = max(drive.stripe for drive in drives)
        space = Space([drive.alignments for drive in drives], capacity, stripe)
        for index, drive in enumerate(drives):
            size = space.first_size(drive.file.size)
            if size > drive.file.size:
                drive.grow(Growth(index, size, size))
            space.grown(index, size)
        stack.pop_all()
    return drives, space


def _open_drive(
    folder: str | os.PathLike[str],
    device: str | torch.device,
    backend: str,
    options: dict[str, Any],
) -> OpenDrive:
    with contextlib.ExitStack() as stack:
        claim = stack.enter_context(SpillFolder(folder).claim())
        engine = open_engine(os.path.dirname(claim.path), device, backend, **options)
        stack.enter_context(engine)
        file = engine.open(claim.name, "r+", SHORTEST)
        if not os.path.samestat(os.fstat(file.fd), os.stat(claim.path, follow_symlinks=False)):
            raise BrokenError("The spill file was replaced while it was opened", path=claim.path)
        # Extents own all blocks that they touch.
        file.exclusive = True
        stack.pop_all()
    return OpenDrive(claim, engine, file)


def prepare(drives: Sequence[OpenDrive], plan: Plan, write: bool) -> list[tuple[Engine, Batch]]:
    """Return a checked batch for each drive that a plan concerns.

    Requests go in the order of their offsets, so that small neighbours can move together.

    Raises
    ------
    UnsupportedError, ClosedError
        As `Engine.prepare` does.
    """
    requests: list[list[Request]] = [[] for _ in drives]
    files = [drive.file for drive in drives]
    for item, extent in zip(plan.items, plan.extents, strict=True):
        pieces = extent.pieces
        if len(pieces) == 1:
            piece = pieces[0]
            requests[piece.drive].append(
                Request(item.tensor, files[piece.drive], piece.offset, item.nbytes, write)
            )
        elif pieces:
            start, flat = 0, item.tensor.detach().reshape(-1).view(torch.uint8)
            for piece in pieces:
                part = flat[start : start + piece.nbytes]
                requests[piece.drive].append(
                    Request(part, files[piece.drive], piece.offset, piece.nbytes, write)
                )
                start += piece.nbytes
    for batch in requests:
        batch.sort(key=_offset)
    return [
        (drive.engine, drive.engine.prepare(batch))
        for drive, batch in zip(drives, requests, strict=True)
        if batch
    ]
