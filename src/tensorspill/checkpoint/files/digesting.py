"""The digests of a file's chunks, computed beside the transfers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.checkpoint.files.records import digest_span

__all__ = ["Digests", "digest_memory"]

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]


def digest_memory(addresses: Int64s, sizes: Int64s) -> UInt64s:
    """Return the digest of each range of host memory, which must stay where it is meanwhile."""
    # Late, because importing numba takes a good part of a second.
    from tensorspill.checkpoint.files.digest_rows import digest_rows

    out = np.zeros(len(addresses), "u8")
    digest_rows(np.ascontiguousarray(addresses), np.ascontiguousarray(sizes), out)
    return out


class Digests:
    """One row for each span of each chunk, in the order of the file.

    Rows are computed in that order too, as soon as their memory is known and still in the caches.

    Parameters
    ----------
    sizes, offsets : sequence of int
        Bytes of each chunk, and where it is in the file.
    """

    def __init__(self, sizes: Sequence[int], offsets: Sequence[int]) -> None:
        nbytes = np.array(sizes, "i8")
        #: Of each chunk.
        span_of = {size: digest_span(size) for size in set(sizes)}
        self.spans = [span_of[size] for size in sizes]
        spans = np.array(self.spans, "i8")
        counts = -(-nbytes // np.maximum(spans, 1))
        self._first = np.concatenate([[0], np.cumsum(counts)])
        chunk = np.repeat(np.arange(len(nbytes)), counts)
        self._start = (np.arange(len(chunk)) - self._first[chunk]) * spans[chunk]
        self._sizes = np.minimum(spans[chunk], nbytes[chunk] - self._start)
        self._file_end = np.array(offsets, "i8")[chunk] + self._start + self._sizes
        self._addresses = np.zeros(len(chunk), "i8")
        self._out = np.zeros(len(chunk), "u8")
        self._chunk = chunk
        self._done = 0

    def in_memory(self, first: int, addresses: Sequence[int]) -> None:
        """Say where the content of chunks `first` and following is."""
        rows = slice(self._first[first], self._first[first + len(addresses)])
        bases = np.array(addresses, "i8")[self._chunk[rows] - first]
        self._addresses[rows] = bases + self._start[rows]

    def in_part(self, chunk: int, start: int, nbytes: int, address: int) -> None:
        """Say where some of the bytes of one chunk are: whole spans, or up to its end."""
        begin, end = self._first[chunk], self._first[chunk + 1]
        a, b = begin + np.searchsorted(self._start[begin:end], [start, start + nbytes])
        self._addresses[a:b] = address + self._start[a:b] - start

    def compute(self, position: int) -> None:
        """Compute the rows that end at `position` of the file, or before."""
        rows = slice(self._done, int(np.searchsorted(self._file_end, position, "right")))
        self._out[rows] = digest_memory(self._addresses[rows], self._sizes[rows])
        self._done = rows.stop

    def compute_on_device(self, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """Compute the rows of chunks `first` and following, which are contiguous device memory."""
        from tensorspill.pool.kernels.digesting import begin_digests

        rows = slice(int(self._first[first]), int(self._first[first + len(tensors)]))
        flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        parts = [
            flat[chunk][start : start + size]
            for chunk, start, size in zip(
                (self._chunk[rows] - first).tolist(),
                self._start[rows].tolist(),
                self._sizes[rows].tolist(),
                strict=True,
            )
        ]
        self._out[rows] = np.array(begin_digests(parts).values(), "u8")
        self._done = rows.stop

    def of_chunks(self, first: int, last: int) -> list[bytes]:
        """Return the digests of some chunks, 8 bytes each; they must have been computed."""
        edges = self._first[first : last + 1]
        data = self._out[edges[0] : edges[-1]].astype("<u8").tobytes()
        places = (8 * (edges - edges[0])).tolist()
        return [data[a:b] for a, b in itertools.pairwise(places)]
