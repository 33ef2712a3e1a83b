"""What the README shows runs as shown."""

import re
from pathlib import Path

from tests.documents import blocks, run

README = Path(__file__).resolve().parents[1] / "README.md"


def test_quickstart_runs(tmp_path: Path) -> None:
    shown = blocks(README)
    assert len(shown) >= 4
    assert all(block.not_run is None for block in shown)
    assert sum(block.code.count('"/tmp/spill"') for block in shown) == 1
    run(shown, tmp_path)


def test_error_table_names_every_error() -> None:
    from tensorspill import errors

    named = set(re.findall(r"^\| `(\w+Error)` \|", README.read_text(), re.MULTILINE))
    assert named == set(errors.__all__) - {"SpillError"}
