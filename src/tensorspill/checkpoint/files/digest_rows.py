"""Digests of many ranges of memory in one compiled call; import it only where one is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from tensorspill.host_fallback import libc
from tensorspill.jit import compiled
from tensorspill.pool.digest_kernels import sum_words

__all__ = ["digest_rows"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_LENGTH = np.uint64(0xD1B54A32D192ED03)


@compiled
def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@compiled
def digest_rows(addresses: Any, sizes: Any, out: Any) -> None:
    """Put the digest of each range ``[addresses[i], addresses[i] + sizes[i])`` into ``out[i]``.

    Equal to `tensorspill.pool.digest` of the same bytes, which must stay where they are meanwhile.
    """
    for row in range(addresses.size):
        words = sizes[row] // 8
        total = sum_words(carray(libc.at(addresses[row]), words, np.uint64))
        rest = sizes[row] - words * 8
        if rest:
            tail = carray(libc.at(addresses[row] + words * 8), rest, np.uint8)
            word = np.uint64(0)
            for i in range(rest):
                word |= np.uint64(tail[i]) << np.uint64(8 * i)
            total += _mix(word + np.uint64(words + 1) * _GOLDEN)
        out[row] = _mix(total + np.uint64(sizes[row]) * _LENGTH)
