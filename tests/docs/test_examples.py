"""Every page's examples run as shown, and its commands are such that exist."""

import shlex
from pathlib import Path

import pytest

from tensorspill import cli
from tests.docs.pages import SOURCES
from tests.documents import Block, blocks, run

PAGES = [page for page in SOURCES if blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    shown = blocks(page)
    if all(block.not_run for block in shown):
        pytest.skip(f"{page.name}: {shown[0].not_run}")
    run(shown, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_that_are_not_run_are_python(page: Path) -> None:
    for block in _not_run(page):
        compile(block.code, page.name, "exec")
        assert block.not_run is not None
        assert block.not_run.startswith("needs "), "Say what it needs"


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    parser = cli._parser()
    for block in blocks(page, "shell"):
        for line in block.code.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["tensorspill"]:
                parser.parse_args(words[1:])  # ends the process if it is wrong


def _not_run(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.not_run is not None]
