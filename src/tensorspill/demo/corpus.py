"""Text to train on: the source of Python's standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tensorspill.errors import BrokenError, UnsupportedError

__all__ = ["Corpus", "read_corpus"]

_LEFT_OUT = frozenset(("site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"))


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """A text, as bytes.

    Attributes
    ----------
    name : str
        What it is.
    text : torch.Tensor
        uint8, one-dimensional.
    """

    name: str
    text: torch.Tensor

    def batches(
        self, count: int, batch: int, context: int, seed: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield `count` random batches, the same for the same seed.

        Returns
        -------
        iterator of (inputs, targets)
            Each (batch, context) of int64; the targets are the inputs moved on by one.

        Raises
        ------
        UnsupportedError
            The text is shorter than one piece of it.
        """
        starts = self.text.numel() - context
        if starts < 1:
            raise UnsupportedError(f"The text needs more than {context} bytes")
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            first = torch.randint(starts, (batch, 1), generator=generator)
            pieces = self.text[first + torch.arange(context + 1)].long()
            yield pieces[:, :-1], pieces[:, 1:]


def read_corpus(path: Path | None, nbytes: int) -> Corpus:
    """Return the first `nbytes` of a file, or of the standard library's modules in their order.

    Raises
    ------
    MissingFileError, BrokenError
        The file can't be read.
    UnsupportedError
        This Python has no sources.
    """
    try:
        if path is not None:
            with path.open("rb") as file:
                return Corpus(str(path), _as_tensor(file.read(nbytes)))
        text = _standard_library(nbytes)
    except OSError as error:
        where = error.filename or path
        raise BrokenError.from_oserror(error, "Can't read the text", path=where) from error
    if not text:
        raise UnsupportedError("This Python has no sources of its library; name another text")
    return Corpus("Python's standard library", _as_tensor(text))


def _standard_library(nbytes: int) -> bytes:
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if len(text) >= nbytes:
            break
        if not _LEFT_OUT.intersection(path.relative_to(root).parts):
            text += path.read_bytes()
    return bytes(text[:nbytes])


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())
