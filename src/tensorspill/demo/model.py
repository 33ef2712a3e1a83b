"""A small byte-level GPT."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["GPT", "Block", "Shape"]

_VALUES_OF_A_BYTE = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the model is, and what it sees at a time.

    Attributes
    ----------
    layers, width, heads : int
        Of the transformer.
    context : int
        Bytes of text that a prediction may look back on.
    """

    layers: int = 16
    width: int = 256
    heads: int = 4
    context: int = 128


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self._heads = shape.heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        with torch.no_grad():  # keeps the sum over all layers at the scale of one
            self.attended.weight /= math.sqrt(2 * shape.layers)
            self.contract.weight /= math.sqrt(2 * shape.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next layer's input, of shape (batch, context, width)."""
        x = x + self._attention(self.before_attention(x))
        hidden = functional.gelu(self.expand(self.before_perceptron(x)))
        result: torch.Tensor = x + self.contract(hidden)
        return result

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(x).view(batch, length, 3, self._heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: torch.Tensor = self.attended(mixed.transpose(1, 2).reshape(batch, length, width))
        return attended


class GPT(nn.Module):
    """Predicts the next byte.

    Parameters
    ----------
    shape : Shape
        How large.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_VALUES_OF_A_BYTE, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.last = nn.LayerNorm(shape.width)
        with torch.no_grad():
            self.bytes.weight *= 0.02
            self.places.weight *= 0.02
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, _VALUES_OF_A_BYTE, bias=False)
        self.head.weight = self.bytes.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next byte; `text` is (batch, context) of int64."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.last(x))
        return logits
