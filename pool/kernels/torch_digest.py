"""The digest's sum on any device that torch has, where there is no Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["sum_words"]

#: Words at a time: what is in between takes five times their memory.
_CHUNK = 1 << 20


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


# torch multiplies and adds 64-bit integers modulo 2**64, but has only signed ones on all devices.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def sum_words(tensors: Sequence[torch.Tensor], sums: torch.Tensor) -> None:
    """Add the sums of mixed words of each tensor's bytes to `sums`, int64 on the same device."""
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), _CHUNK * 8):
            sums[index] += _chunk(flat[begin : begin + _CHUNK * 8], begin // 8)


def _chunk(part: torch.Tensor, first: int) -> torch.Tensor:
    # A copy: aligned, and the last word filled up with zeros.
    count = -(-part.numel() // 8)
    words = torch.zeros(count, dtype=torch.int64, device=part.device)
    words.view(torch.uint8)[: part.numel()] = part
    words += torch.arange(first + 1, first + 1 + count, device=part.device) * _GOLDEN
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return (words ^ _shifted(words, 31)).sum()


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, with zeros coming in: torch's own shift brings in the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
