"""What the doctor can say: read from its source, since no machine has all of it wrong."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tensorspill.doctor import bus, direct, examination, gpus, limits, storage

__all__ = ["remedies"]

_MODULES = (gpus, direct, bus, storage, limits, examination)


def remedies() -> list[tuple[str, str, str]]:
    """Return (layer, what is seen, what helps), in the order in which the doctor shows layers.

    What is only known on the machine is shown as "…"; remedies of which no word is known before,
    which are those of cuFile's codes, are left out.
    """
    layers = _layers()
    found: dict[tuple[str, str], list[str]] = {}
    for module in _MODULES:
        for layer, seen, remedy in _rows(module, layers):
            if remedy != "…":
                found.setdefault((layer, remedy), []).append(seen)
    order = list(dict.fromkeys(layers.values()))
    return [
        (layer, "; or: ".join(filter(_says_something, dict.fromkeys(seen))), remedy)
        for (layer, remedy), seen in sorted(found.items(), key=lambda row: order.index(row[0][0]))
    ]


def _layers() -> dict[str, str]:
    """Return the layer that each function looks at: from the table in `examination.examine`."""
    layers: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(examination))):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Call) and value.args:
                    looked = value.args[0]
                    name = looked.attr if isinstance(looked, ast.Attribute) else looked.id  # type: ignore[attr-defined]
                    layers[name.lstrip("_")] = str(key.value)
    return layers


def _rows(module: ModuleType, layers: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for function in ast.parse(inspect.getsource(module)).body:
        layer = layers.get(getattr(function, "name", "").lstrip("_"))
        if not isinstance(function, ast.FunctionDef) or layer is None:
            continue
        known: dict[str, ast.expr] = {}
        for node in _in_order(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                known[node.targets[0].id] = node.value
            elif _is_row(node) and len(node.args) == 4:
                seen = " or ".join(_texts(node.args[2], module, known))
                for remedy in _texts(node.args[3], module, known):
                    yield layer, seen, remedy


def _says_something(seen: str) -> bool:
    return any(character.isalpha() for character in seen)


def _is_row(node: Any) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Row"


def _in_order(function: ast.FunctionDef) -> list[Any]:
    nodes = [node for node in ast.walk(function) if hasattr(node, "lineno")]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


def _texts(node: ast.expr, module: ModuleType, known: dict[str, ast.expr]) -> list[str]:
    """Return the texts that an expression may have, without those that are empty."""
    if isinstance(node, ast.Constant):
        return [str(node.value)] if node.value else []
    if isinstance(node, ast.Name) and node.id in known:
        rest = {name: value for name, value in known.items() if name != node.id}
        return _texts(known[node.id], module, rest)
    if isinstance(node, ast.Name):
        value = getattr(module, node.id, None)
        return [value] if isinstance(value, str) else ["…"]
    if isinstance(node, ast.IfExp):
        return _texts(node.body, module, known) + _texts(node.orelse, module, known)
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in _texts(value, module, known)]
    if isinstance(node, ast.JoinedStr):
        parts = [
            _texts(part.value if isinstance(part, ast.FormattedValue) else part, module, known)
            for part in node.values
        ]
        return ["".join(part[0] if part else "" for part in parts)]
    return ["…"]
