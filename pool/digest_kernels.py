"""Compiled kernels of `tensorspill.pool.digest`; import it only where one is needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensorspill.jit import compiled

__all__ = ["sum_words"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


@compiled
def sum_words(words: NDArray[np.uint64]) -> np.uint64:
    """Return the sum of the mixed words, modulo 2**64.

    A sum of integers may be taken in any order, so the compiler divides the loop into as many
    lanes as the processor has. `words` may begin at any address: compiled code loads words and
    vectors of words without asking for alignment, on x86-64 and aarch64.
    """
    total = np.uint64(0)
    for i in range(words.size):
        x = words[i] + np.uint64(i + 1) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _FIRST
        x = (x ^ (x >> np.uint64(27))) * _SECOND
        total += x ^ (x >> np.uint64(31))
    return total
