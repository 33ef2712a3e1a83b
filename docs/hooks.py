"""Fills in what the pages take from the code: reference, tables, help of commands, figures.

A comment alone on a line, such as ``<!-- cufile codes -->`` or ``<!-- readme: Figures -->``, is
replaced by what the maker of that name returns; so nothing is said twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from doctor_remedies import remedies

ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the comments of a page."""
    return re.sub(r"^<!-- ([a-z ]+)(?:: (.+?))? -->$", _replace, markdown, flags=re.MULTILINE)


def _replace(found: re.Match[str]) -> str:
    maker = MAKERS.get(found[1])
    return found[0] if maker is None else maker(found[2] or "")


# -- reference -----------------------------------------------------------------------------------


def _names(module: str) -> str:
    """Return the reference of all public names of a module, each with its docstring.

    What the packages above it have among their own names as well is described there.
    """
    package = importlib.import_module(module)
    homes = {home(module, name): name.lower() for name in package.__all__}
    above = module.rpartition(".")[0]
    while "." in above:
        for name in getattr(importlib.import_module(above), "__all__", ()):
            homes.pop(home(above, name), None)
        above = above.rpartition(".")[0]
    shown = [f"## `{module}`", _first_paragraph(package)]
    shown += [
        f"::: {where}\n    options:\n      heading_level: 3"
        for where in sorted(homes, key=lambda where: homes[where])
    ]
    return "\n\n".join(shown)


def _front_door(module: str) -> str:
    """Return a table of names that are described on other pages, with links."""
    package = importlib.import_module(module)
    rows = []
    for name in sorted(package.__all__, key=str.lower):
        value = getattr(package, name)
        # A module has a page of its own.
        link = f"(../{name}.md)" if inspect.ismodule(value) else f"[{home(module, name)}]"
        rows.append((f"[`{name}`]{link}", _first_paragraph(value)))
    return _table(("name", ""), rows)


def home(module: str, name: str) -> str:
    """Return where a name is defined, so that it has one place however it is imported."""
    value = getattr(importlib.import_module(module), name)
    if inspect.ismodule(value):
        return value.__name__
    defined = getattr(value, "__module__", module)
    if defined.startswith("tensorspill.") and hasattr(importlib.import_module(defined), name):
        return f"{defined}.{name}"
    return f"{module}.{name}"


def _first_paragraph(value: Any) -> str:
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")


# -- tables --------------------------------------------------------------------------------------


def _cufile_codes(_: str) -> str:
    from tensorspill.gds.codes import BY_CODE

    rows = [
        (code.code, code.text, code.cause, code.remedy)
        for code in sorted(BY_CODE.values(), key=lambda code: code.code)
    ]
    return _table(("code", "what cuFile says", "usually because", "what helps"), rows)


def _doctor(_: str) -> str:
    lines: list[str] = []
    layer = ""
    for looked_at, seen, remedy in remedies():
        if looked_at != layer:
            layer = looked_at
            lines += ["", f"**{layer}**", ""]
        lines.append(f"- {_plain(remedy)}" + (f" — *{_plain(seen)}*" if seen else ""))
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return text in which no character means anything to Markdown."""
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", text)


def _errnos(_: str) -> str:
    from tensorspill.errors import _BY_ERRNO, _REMEDIES, BrokenError

    rows = []
    for code, text in _REMEDIES.items():
        cls = _BY_ERRNO.get(code, BrokenError)
        rows.append((f"`{errno.errorcode[code]}`", os.strerror(code), f"`{cls.__name__}`", text))
    return _table(("errno", "the system says", "raised as", "what helps"), rows)


def _options(path: str) -> str:
    """Return the options of an engine: the fields that a dataclass has beyond its bases."""
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    described = _attributes(cls)
    rows = [
        (f"`{field.name}`", _value(field.default), described.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.name in cls.__annotations__
    ]
    return _table(("option", "default", ""), rows)


def _paths(_: str) -> str:
    """Return the ways that bytes take, as statistics name and explain them."""
    from tensorspill.gds import paths
    from tensorspill.host_fallback import layout

    rows = [
        (f"`{path.name.lower().replace('_', '-')}`", engine, why)
        for engine, table in (("aio", layout.WHY), ("gds", paths.WHY))
        for path, why in table.items()
    ]
    return _table(("path", "engine", "why"), rows)


def _columns(_: str) -> str:
    """Return the columns of a results file, with what each means."""
    from tensorspill.profiling.rows import COLUMNS, Row

    described = _attributes(Row)
    return _table(("column", ""), [(f"`{name}`", described[name]) for name in COLUMNS])


def _value(default: Any) -> str:
    from tensorspill.pool.sizes import format_bytes

    if isinstance(default, int) and default >= 1 << 12:
        return format_bytes(default)
    return "none" if default is None else f"{default}"


def _attributes(cls: type) -> dict[str, str]:
    """Return what a class, and those that it extends, say of their attributes."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        text = inspect.cleandoc(owner.__dict__.get("__doc__") or "")
        for names, said in re.findall(r"^([\w, ]+) : .*\n((?:    .*\n?)+)", text, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(said.split()))
    return found


def _table(heads: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(str(cell).replace("|", r"\|") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


# -- texts ---------------------------------------------------------------------------------------


def _readme(heading: str) -> str:
    """Return a section of the README."""
    text = (ROOT / "README.md").read_text()
    start = rf"^## {re.escape(heading)}\n"
    section = re.search(rf"{start}(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if section is None:
        raise ValueError(f"The README has no section {heading!r}")
    return section[1].strip()


def _help(command: str) -> str:
    """Return what a command says of itself."""
    from tensorspill import cli

    parser = cli._parser()
    for word in command.split():
        parser = next(
            action.choices[word]
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        )
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "90"
    try:
        text = parser.format_help().strip()
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return f'??? note "tensorspill {command} --help"\n\n' + _indented(f"```text\n{text}\n```")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


MAKERS: dict[str, Callable[[str], str]] = {
    "columns": _columns,
    "cufile codes": _cufile_codes,
    "doctor": _doctor,
    "errnos": _errnos,
    "front door": _front_door,
    "help": _help,
    "names": _names,
    "options": _options,
    "paths": _paths,
    "readme": _readme,
}
