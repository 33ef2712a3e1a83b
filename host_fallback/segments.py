"""Cutting requests into segments: which bytes go direct, staged or buffered.

What O_DIRECT can't take as it is goes through staging blocks. A *granule* is the unit of whole
blocks: at least a page, so that one page of a file is never written both through the page cache
and around it.

- Large requests at an address that O_DIRECT takes move straight from the caller's memory, except
  for a head and a tail of less than a granule.
- Small requests that follow one another in the file are packed: copied into one block and moved
  together, which is cheaper than one operation each.
- Reads, and writes to *exclusive* files, move whole granules around what is needed. Other writes
  leave partial granules to the page cache, since the rest of these belongs to somebody else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorspill.host_fallback.layout import Mode, Path
from tensorspill.jit import compiled

__all__ = ["PACK_BELOW", "cut"]

#: Requests smaller than this are packed with their neighbours. At odd addresses, on a virtio disk,
#: packing gave 6-7 times the rate at 4 KiB, 1.2-1.3 times at 64 KiB, and nothing at 1 MiB; from
#: aligned memory, where neighbours are joined without a copy, the rates differ by less than 20 %
#: either way (benchmarks/pack_threshold.py).
PACK_BELOW = 128 * 1024

_DIRECT, _STAGED, _BUFFERED = int(Mode.DIRECT), int(Mode.STAGED), int(Mode.BUFFERED)
_PATH_DIRECT, _PATH_STAGED = int(Path.DIRECT), int(Path.STAGED)
_PATH_PACKED, _PATH_EDGE = int(Path.PACKED), int(Path.EDGE)
_PATH_BUFFERED = int(Path.BUFFERED)

Table = np.ndarray[Any, Any]


@compiled
def _down(value: int, step: int) -> int:
    return value - value % step


@compiled
def _up(value: int, step: int) -> int:
    return value + (-value) % step


@compiled
def _emit(
    out: Table,
    n: int,
    mode: int,
    path: int,
    request: Any,
    begin: int,
    end: int,
    useful: int,
    first: int,
    last: int,
) -> int:
    """Append the file range [begin, end) to `out`, unless it is empty; return the new length."""
    if end <= begin:
        return n
    segment = out[n]
    segment.mode, segment.path = mode, path
    segment.file, segment.write = request.file, request.write
    segment.addr = request.addr + begin - request.offset
    segment.offset, segment.nbytes, segment.useful = begin, end - begin, useful
    segment.first, segment.last = first, last
    return n + 1


@compiled
def _joins(before: Any, after: Any, granule: int, pads: bool) -> bool:
    """Whether two requests can share a staged run: same file and direction, and no foreign gap."""
    if before.file != after.file or before.write != after.write:
        return False
    end = before.offset + before.nbytes
    if pads:
        return bool(after.offset >= end and _down(after.offset, granule) <= _up(end, granule))
    return bool(after.offset == end)


@compiled
def _goes_direct(request: Any, file: Any) -> bool:
    """Whether at least one whole granule can move straight from the caller's memory."""
    begin = _up(request.offset, file.granule)
    end = _down(request.offset + request.nbytes, file.granule)
    return bool(end > begin and (request.addr + begin - request.offset) % file.memory == 0)


@compiled
def _run_end(requests: Table, first: int, file: Any, pads: bool, pack_below: int) -> int:
    """Return the last request of the run of small neighbours that starts at `first`."""
    last = first
    if requests[first].nbytes < pack_below:
        while (
            last + 1 < len(requests)
            and requests[last + 1].nbytes < pack_below
            and _joins(requests[last], requests[last + 1], file.granule, pads)
        ):
            last += 1
    return last


@compiled
def _cut_direct(out: Table, n: int, requests: Table, i: int, file: Any, pads: bool) -> int:
    """Emit head, middle and tail of a request whose middle goes direct."""
    request = requests[i]
    start, stop = request.offset, request.offset + request.nbytes
    begin, end = _up(start, file.granule), _down(stop, file.granule)
    edge = _STAGED if pads else _BUFFERED
    head = begin - file.granule if pads else start
    tail = end + file.granule if pads else stop
    if start < begin:
        n = _emit(out, n, edge, _PATH_EDGE, request, head, begin, begin, i, i)
    n = _emit(out, n, _DIRECT, _PATH_DIRECT, request, begin, end, end, i, i)
    if end < stop:
        n = _emit(out, n, edge, _PATH_EDGE, request, end, tail, stop, i, i)
    return n


@compiled
def _cut_buffered(
    out: Table, n: int, requests: Table, first: int, last: int, begin: int, end: int, path: int
) -> int:
    """Emit what requests `first` to `last` have in [begin, end) for the page cache."""
    for i in range(first, last + 1):
        request = requests[i]
        low = max(begin, request.offset)
        high = min(end, request.offset + request.nbytes)
        n = _emit(out, n, _BUFFERED, path, request, low, high, high, i, i)
    return n


@compiled
def _cut_staged(
    out: Table, n: int, requests: Table, first: int, last: int, file: Any, pads: bool
) -> int:
    """Emit a run of requests that goes through staging blocks."""
    start, stop = requests[first].offset, requests[last].offset + requests[last].nbytes
    path = _PATH_PACKED if last > first else _PATH_STAGED
    if pads:
        begin, end = _down(start, file.granule), _up(stop, file.granule)
        if last == first and end - begin <= file.granule:
            path = _PATH_EDGE
        return _emit(out, n, _STAGED, path, requests[first], begin, end, stop, first, last)
    begin, end = _up(start, file.granule), _down(stop, file.granule)
    if begin >= end:
        return _cut_buffered(out, n, requests, first, last, start, stop, _PATH_EDGE)
    n = _cut_buffered(out, n, requests, first, last, start, begin, _PATH_EDGE)
    n = _emit(out, n, _STAGED, path, requests[first], begin, end, end, first, last)
    return _cut_buffered(out, n, requests, first, last, end, stop, _PATH_EDGE)


@compiled
def cut(requests: Table, files: Table, out: Table, pack_below: int) -> int:
    """Cut requests into segments; return how many were written to `out`.

    Parameters
    ----------
    requests : ndarray of `REQUEST`
    files : ndarray of `FILE`
    out : ndarray of `SEGMENT`
        With room for three segments a request, plus one.
    pack_below : int
        Bytes; `PACK_BELOW` unless the threshold itself is measured.
    """
    n = 0
    i = 0
    while i < len(requests):
        request = requests[i]
        file = files[request.file]
        if file.direct < 0:
            stop = request.offset + request.nbytes
            n = _emit(out, n, _BUFFERED, _PATH_BUFFERED, request, request.offset, stop, stop, i, i)
            i += 1
            continue
        pads = file.exclusive != 0 or request.write == 0
        last = _run_end(requests, i, file, pads, pack_below)
        if last == i and _goes_direct(request, file):
            n = _cut_direct(out, n, requests, i, file, pads)
        elif request.nbytes > 0:
            n = _cut_staged(out, n, requests, i, last, file, pads)
        i = last + 1
    return n
