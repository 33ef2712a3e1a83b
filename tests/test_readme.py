"""What the README shows runs as shown."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_quickstart_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    code = "\n".join(blocks)
    assert code.count('"/tmp/spill"') == 1
    code = code.replace("/tmp/spill", str(tmp_path / "spill"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_error_table_names_every_error() -> None:
    from tensorspill import errors

    named = set(re.findall(r"^\| `(\w+Error)` \|", README.read_text(), re.MULTILINE))
    assert named == set(errors.__all__) - {"SpillError"}
