"""Loading a folder of safetensors files into an offloaded model, a block at a time."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorspill.errors import BrokenError, MissingFileError, UnsupportedError
from tensorspill.training.handle import named_state, offloaded

__all__ = ["load_safetensors"]

_INDEX = "model.safetensors.index.json"
_MOST_NAMED = 5


def load_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load the values of an offloaded model, in memory for two of its blocks.

    Parameters
    ----------
    model : torch.nn.Module
        Built by `init` or given to `offload`.
    folder : str or path
        With one or more ``*.safetensors``; of an index file if there is one. Values are cast to
        the dtypes of the model.
    strict : bool
        Refuse names that only one side has.

    Returns
    -------
    missing, unexpected : list of str
        Names that only the model has, and that only the files have.

    Raises
    ------
    UnsupportedError
        Names or shapes differ; the index names files elsewhere; safetensors is not installed.
        Nothing changed.
    MissingFileError, BrokenError
        A file is missing, broken, or can't be read. Parameters of blocks that were loaded before
        have their new values.
    """
    handle = offloaded(model)
    where = _files(Path(folder))
    targets = dict(named_state(model))
    missing, unexpected = _compare(targets, where)
    if strict and (missing or unexpected):
        raise UnsupportedError(
            f"The files lack {_some(missing)} and have {_some(unexpected)} beside the model's",
            path=folder,
            remedy="Load with strict=False",
        )
    wanted = {name: target for name, target in targets.items() if name in where}
    _check_shapes(wanted, where)
    for group in _groups(wanted, handle.residency.blocks()):
        parameters = [wanted[name] for name in group]
        with handle.residency.updating_parameters(parameters), torch.no_grad():
            _copy({name: wanted[name] for name in group}, where)
    handle.flush()
    return missing, unexpected


def _files(folder: Path) -> dict[str, Path]:
    """Return which file has which tensor."""
    index = folder / _INDEX
    if index.exists():
        return _indexed(folder, index)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise MissingFileError("There are no safetensors files", path=folder)
    where: dict[str, Path] = {}
    for path in paths:
        with _open(path) as file:
            where |= dict.fromkeys(file.keys(), path)
    return where


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    try:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        inside = all(Path(name).name == name for name in names.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BrokenError("The index can't be read", path=index) from error
    if not inside:
        raise UnsupportedError("The index names files outside of its folder", path=index)
    return {name: folder / file for name, file in names.items()}


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UnsupportedError(
            "safetensors is not installed", remedy="pip install 'tensorspill[checkpoint]'"
        ) from error
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError as error:
        raise MissingFileError("The file is missing", path=path) from error
    except (OSError, SafetensorError) as error:
        raise BrokenError(f"The file can't be read: {error}", path=path) from error


def _compare(
    targets: Mapping[str, torch.Tensor], where: Mapping[str, Path]
) -> tuple[list[str], list[str]]:
    """Return names that only the model has, and that only the files have.

    A tied parameter that has a value under another name is not missing.
    """
    loaded = {id(target) for name, target in targets.items() if name in where}
    missing = [n for n, target in targets.items() if n not in where and id(target) not in loaded]
    return missing, [name for name in where if name not in targets]


def _check_shapes(wanted: Mapping[str, torch.Tensor], where: Mapping[str, Path]) -> None:
    for path, names in _by_file(wanted, where).items():
        with _open(path) as file:
            for name in names:
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(wanted[name].shape):
                    raise UnsupportedError(
                        f"{name!r} is {shape} in the file, {tuple(wanted[name].shape)} in the "
                        "model",
                        path=path,
                    )


def _groups(
    wanted: Mapping[str, torch.Tensor], blocks: Iterable[list[torch.Tensor]]
) -> list[list[str]]:
    """Divide names by block; what is in none comes first."""
    number = {id(p): n for n, block in enumerate(blocks, 1) for p in block}
    groups: dict[int, list[str]] = defaultdict(list)
    for name, target in wanted.items():
        groups[number.get(id(target), 0)].append(name)
    return [groups[n] for n in sorted(groups)]


def _copy(wanted: Mapping[str, torch.Tensor], where: Mapping[str, Path]) -> None:
    """Copy values, each file mapped only as long as that takes."""
    for path, names in _by_file(wanted, where).items():
        with _open(path) as file:
            for name in names:
                wanted[name].copy_(file.get_tensor(name))


def _by_file(names: Iterable[str], where: Mapping[str, Path]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = defaultdict(list)
    for name in names:
        files[where[name]].append(name)
    return files


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
