"""Examples in Markdown: found, and run as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "blocks", "run"]

_BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>.+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
#: Folders that stand for one on a fast drive.
_DRIVES = ("/tmp/spill", "/mnt/nvme")


@dataclass(frozen=True)
class Block:
    """A block of code, and why it is not run here, if so."""

    code: str
    not_run: str | None


def blocks(document: Path, language: str = "python") -> list[Block]:
    """Return the blocks of a language; a comment ``not run: why`` before one is its reason."""
    return [
        Block(re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE), found["reason"])
        for found in _BLOCK.finditer(document.read_text())
        if found["language"] == language
    ]


def run(shown: list[Block], folder: Path) -> None:
    """Run what is to be run, one block after the other, in a process of its own in a folder."""
    code = "\n".join(block.code for block in shown if block.not_run is None)
    for drive in _DRIVES:
        code = code.replace(drive, str(folder / Path(drive).name))
    (folder / "nvme").mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
