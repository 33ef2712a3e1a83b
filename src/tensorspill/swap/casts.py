"""Casting into the stored dtype, in waves: one is cast while the last ones are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import CapacityError, UnsupportedError
from tensorspill.pool.kernels.casting import cast
from tensorspill.swap.buffers import SwapBuffers
from tensorspill.swap.entries import Entry
from tensorspill.swap.status import SwapStatus

__all__ = ["cast_in_waves", "check_sources"]

WAVE_BYTES = 32 << 20


def check_sources(entries: Sequence[Entry], sources: Sequence[torch.Tensor]) -> None:
    """Refuse sources that are not one for each parameter, with as many elements.

    Raises
    ------
    UnsupportedError
    """
    if len(entries) != len(sources):
        raise UnsupportedError(f"{len(entries)} parameters, {len(sources)} tensors to cast")
    for entry, source in zip(entries, sources, strict=True):
        if not isinstance(source, torch.Tensor) or source.numel() != entry.numel:
            raise UnsupportedError(
                f"A parameter of {entry.numel} elements can't be cast from "
                f"{getattr(source, 'shape', source)}"
            )


def cast_in_waves(
    entries: Sequence[Entry],
    sources: Sequence[torch.Tensor],
    buffers: SwapBuffers,
    write: Callable[[list[Entry]], Transfer],
    waves: list[Transfer],
) -> None:
    """Cast and write parameters, as many at a time as there is memory for.

    Parameters
    ----------
    entries, sources
        As `check_sources` wants them.
    buffers : SwapBuffers
        Where memory comes from for those that are not in memory.
    write : callable
        Begins to write entries of which each is in memory or has a buffer.
    waves : list of Transfer
        Gets what was begun.

    Raises
    ------
    CapacityError
        There is no memory for a parameter even when all waves have ended.
    SpillError
        As `write`, or as a wave that had to be waited for.
    """
    left = deque(zip(entries, sources, strict=True))
    under_way: deque[Transfer] = deque()
    while left:
        wave: list[Entry] = []
        fresh: list[Entry] = []
        try:
            _fill(wave, fresh, left, buffers)
            if wave:
                waves.append(write(wave))
                under_way.append(waves[-1])
                continue
        except BaseException:
            with HeldInterrupts():
                _give_up([e for e in fresh if e.status is not SwapStatus.INFLIGHT], buffers)
            raise
        if not under_way:
            # Says how much is lacking.
            buffers.give_back(buffers.take([left[0][0]]))
        else:
            under_way.popleft().result()


def _fill(
    wave: list[Entry],
    fresh: list[Entry],
    left: deque[tuple[Entry, torch.Tensor]],
    buffers: SwapBuffers,
) -> None:
    """Move entries from `left` to `wave`, cast, until it is large enough or memory is short.

    Those that got a buffer for it are in `fresh` as well.
    """
    size = 0
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    while left and size < WAVE_BYTES:
        entry, source = left[0]
        with HeldInterrupts(), torch.inference_mode(False):
            if entry.taken is None and entry.status is not SwapStatus.AVAILABLE:
                try:
                    (entry.taken,) = buffers.take([entry])
                except CapacityError:
                    break
                fresh.append(entry)
            wave.append(entry)
            left.popleft()
            targets.append(entry.data if entry.taken is None else entry.view(entry.taken))
        sources.append(source)
        size += entry.nbytes
    cast(sources, targets)


def _give_up(fresh: Sequence[Entry], buffers: SwapBuffers) -> None:
    """Give back what was taken for a wave that was not begun."""
    taken = [entry.taken for entry in fresh if entry.taken is not None]
    for entry in fresh:
        entry.taken = None
    buffers.give_back(reversed(taken))
