"""The pages build without a warning, have everything that is public, and need no network."""

import importlib
import inspect
import pkgutil
import re
import urllib.parse
from pathlib import Path

import pytest

import tensorspill
from tensorspill import cli, errors
from tests.docs.pages import built, text_of

#: Parts that are used by commands and not imported by users.
INSIDE = ("commands", "demo", "doctor")


def public_names() -> dict[str, str]:
    """Return {public name: where it is defined}, of all packages, modules left out."""
    packages = ["tensorspill"]
    packages += [
        found.name
        for found in pkgutil.iter_modules(tensorspill.__path__, "tensorspill.")
        if found.ispkg and found.name.rpartition(".")[2] not in INSIDE
    ]
    names = {}
    for package in map(importlib.import_module, packages):
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            if not inspect.ismodule(value):
                where = getattr(value, "__module__", package.__name__)
                names[f"{package.__name__}.{name}"] = f"{where}.{name}"
    return names


def test_every_public_name_has_a_place(site: Path) -> None:
    from mkdocstrings import Inventory

    with (site / "objects.inv").open("rb") as file:
        inventory = Inventory.parse_sphinx(file)
    names = public_names()
    assert len(names) > 100
    # A function may have the name of its module, and is found by where it is defined then.
    found = {name: inventory.get(name) or inventory.get(where) for name, where in names.items()}
    assert [name for name, item in found.items() if item is None] == []
    places = {item.uri.replace("$", item.name) for item in found.values() if item is not None}
    anchors = {page: built(site / page / "index.html").anchors for page in map(_page_of, places)}
    assert [p for p in places if p.partition("#")[2] not in anchors[_page_of(p)]] == []


def _page_of(place: str) -> str:
    return place.partition("#")[0]


def test_every_error_is_there_with_a_remedy(site: Path) -> None:
    page = (site / "errors" / "index.html").read_text()
    starts = [(m.start(), m[1]) for m in re.finditer(r'id="tensorspill\.errors\.(\w+)"', page)]
    sections = {
        name: page[start : starts[i + 1][0] if i + 1 < len(starts) else None]
        for i, (start, name) in enumerate(starts)
    }
    assert sections.keys() >= set(errors.__all__)
    assert [name for name in errors.__all__ if "Remedy:" not in sections[name]] == []
    text = text_of(site / "errors" / "index.html")
    assert [remedy for remedy in errors._REMEDIES.values() if remedy not in text] == []


def test_every_code_of_cufile_is_there_with_its_remedy(site: Path) -> None:
    from tensorspill.gds.codes import BY_CODE

    text = text_of(site / "gds" / "index.html")
    for code in BY_CODE.values():
        assert f"{code.code} {' '.join(code.text.split())}" in text
        assert " ".join(code.remedy.split()) in text


def test_every_layer_of_the_doctor_is_there(site: Path, tmp_path: Path) -> None:
    from tensorspill.doctor.examination import examine

    (tmp_path / "proc").mkdir()
    text = text_of(site / "gds" / "index.html")
    layers = [row.layer for row in examine(tmp_path, str(tmp_path)).rows]
    assert len(layers) > 10
    assert [layer for layer in layers if layer not in text] == []


def test_every_command_is_there_with_its_help(site: Path) -> None:
    text = " ".join(text_of(page) for page in site.rglob("index.html"))
    commands = [name for name in cli.COMMANDS if name != "demo"]
    assert [name for name in commands if f"usage: tensorspill {name}" not in text] == []


def test_figures_are_those_of_the_readme(site: Path) -> None:
    text = text_of(site / "figures" / "index.html")
    assert "not measured" in text
    solid = "".join(text.split())  # there are spaces around code
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| (.+? \| [\d.]+ GB/s) \|", readme, re.MULTILINE)
    assert rows
    assert [row for row in rows if re.sub(r"[\s|`]", "", row) not in solid] == []


def test_links_lead_somewhere(site: Path) -> None:
    pages = {page: built(page) for page in site.rglob("*.html") if page.name != "404.html"}
    lost = []
    for page, read in pages.items():
        for link in read.links:
            if urllib.parse.urlsplit(link).scheme:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and anchor not in pages[target].anchors):
                lost.append(f"{page.relative_to(site)}: {link}")
    assert lost == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = {link for page in site.rglob("*.html") for link in built(page).loads}
    assert len(loads) > 3
    assert [link for link in loads if urllib.parse.urlsplit(link).netloc] == []


@pytest.mark.parametrize("left", ["<!-- names", "<!-- help", "<!-- readme", "<!-- options"])
def test_every_comment_was_replaced(site: Path, left: str) -> None:
    assert [page for page in site.rglob("*.html") if left in page.read_text()] == []
