"""The kernels in Triton. Imported only where GPU memory is touched, or for Triton's interpreter.

Every program of a launch takes one row of a table, which says where its block of bytes or elements
lies; so one launch serves any number of tensors of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import triton
import triton.language as tl

__all__ = ["add_words", "cast_elements"]

Function = TypeVar("Function", bound=Callable[..., Any])

# The constants of `tensorspill.pool.digest`.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


def _kernel(function: Function) -> Function:
    return cast(Function, triton.jit(function))


@_kernel
def _mixed(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@_kernel
def add_words(
    table: tl.tensor,
    sums: tl.tensor,
    LANES: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
) -> None:
    """Add the mixed words of each block to the sum of the tensor that it belongs to.

    A row is the block's address, its bytes, the index of its first word in the tensor, and the
    index of the tensor's sum. Sums are 64-bit and start from 0; the order does not matter.
    """
    row = table + tl.program_id(0) * 4
    address, nbytes = tl.load(row), tl.load(row + 1)
    first, owner = tl.load(row + 2).to(tl.uint64), tl.load(row + 3)
    lane = tl.arange(0, LANES)
    stride: tl.constexpr = (LANES * _GOLDEN) % 0x1_0000_0000_0000_0000
    position = (first + 1 + lane.to(tl.uint64)) * _GOLDEN
    total = tl.zeros([LANES], tl.uint64)
    if (address % 16 == 0) & (nbytes == LANES * STEPS * 8):
        words = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
        for step in range(STEPS):
            total += _mixed(tl.load(words + step * LANES + lane) + position)
            position += stride
    else:
        # A word that lies across two aligned ones is put together of both. An aligned word is read
        # only if it holds a byte of the block, so nothing outside the memory's pages is touched.
        lead = address % 8
        # Bytes of a word that lie in its first aligned one: all, if it is aligned itself.
        held = tl.where(lead > 0, 8 - lead, nbytes)
        words = (address - lead).to(tl.pointer_type(tl.uint64))
        down = (lead * 8).to(tl.uint64)
        up = ((64 - lead * 8) % 64).to(tl.uint64)
        for step in range(STEPS):
            at = step * LANES + lane
            left = nbytes - at * 8
            low = tl.load(words + at, mask=left > 0, other=0)
            high = tl.load(words + at + 1, mask=left > held, other=0)
            word = (low >> down) | (high << up)
            # Bytes beyond the end count as zeros.
            beyond = tl.minimum(tl.maximum(8 - left, 0), 7).to(tl.uint64) * 8
            word = (word << beyond) >> beyond
            mixed = _mixed(word + position)
            total += tl.where(left > 0, mixed, tl.zeros([LANES], tl.uint64))
            position += stride
    tl.atomic_add(sums + owner, tl.sum(total))


@_kernel
def _converted(x: tl.tensor, KIND: tl.constexpr) -> Any:  # noqa: N803
    if KIND == "f32-bf16":
        # Bits, so that it is the same in Triton's interpreter and on GPUs without bfloat16: round
        # to nearest, ties to even; infinities stay, and NaN is the one that torch has on a GPU.
        rounded = (x + 0x7FFF + ((x >> 16) & 1)) >> 16
        x = tl.where((x & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded).to(tl.uint16)
    elif KIND == "f32-f16":
        x = x.to(tl.float16)
    elif KIND == "bf16-f32":
        x = x.to(tl.uint32) << 16
    elif KIND == "f16-f32":
        x = x.to(tl.float32)
    return x


@_kernel
def cast_elements(
    table: tl.tensor,
    SOURCE: tl.constexpr,  # noqa: N803
    TARGET: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    STEPS: tl.constexpr,  # noqa: N803
) -> None:
    """Convert each block's elements.

    A row is the address of the block's elements, the address that they go to, and their number.
    `SOURCE` and `TARGET` are what is loaded and stored: for bfloat16 its bits.
    """
    row = table + tl.program_id(0) * 4
    source, target, count = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    lane = tl.arange(0, LANES)
    if (source % 16 == 0) & (target % 16 == 0) & (count == LANES * STEPS):
        loads = tl.multiple_of(source.to(tl.pointer_type(SOURCE)), 16)
        stores = tl.multiple_of(target.to(tl.pointer_type(TARGET)), 16)
        for step in range(STEPS):
            at = step * LANES + lane
            tl.store(stores + at, _converted(tl.load(loads + at), KIND))
    else:
        loads = source.to(tl.pointer_type(SOURCE))
        stores = target.to(tl.pointer_type(TARGET))
        for step in range(STEPS):
            at = step * LANES + lane
            inside = at < count
            tl.store(stores + at, _converted(tl.load(loads + at, mask=inside), KIND), mask=inside)
