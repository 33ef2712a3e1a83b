"""The sources of the pages, and reading what was built from them."""

from __future__ import annotations

import functools
import html
import html.parser
import re
from pathlib import Path

__all__ = ["ROOT", "SOURCES", "Built", "built", "text_of"]

ROOT = Path(__file__).resolve().parents[2]
#: Pages written by hand; those of the reference are made from docstrings.
SOURCES = sorted((ROOT / "docs").glob("*.md"))


@functools.cache
def built(page: Path) -> Built:
    """Return what a page links to, once read."""
    return Built(page)


class Built(html.parser.HTMLParser):
    """What a built page links to, what in it can be linked to, and what it loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := named.get(name))}
        if tag == "a" and (link := named.get("href")):
            self.links.append(link)
        if tag in ("script", "img", "iframe", "source") and (source := named.get("src")):
            self.loads.append(source)
        if tag == "link" and named.get("rel") in ("stylesheet", "preconnect", "icon", "preload"):
            self.loads.append(named.get("href") or "")


@functools.cache
def text_of(page: Path) -> str:
    """Return the text of a built page, with one space between words."""
    text = re.sub(r"<(script|style).*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())
