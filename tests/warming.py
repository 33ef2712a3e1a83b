"""Do once what every process of a test run would do first: ``python -m tests.warming``.

Modules and kernels are compiled, and the stand-ins for the driver built. In a fresh clone a dozen
processes, that each import the same gigabytes of packages, would do so side by side.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

#: Each in a process of its own; the first that fails ends one, since a package may be missing.
_PARTS = (
    """
import tempfile, torch, torch._dynamo
from tensorspill import SpillFile, checkpoint
with tempfile.TemporaryDirectory() as folder:
    state = {"w": torch.arange(1 << 16, dtype=torch.float32), "t": torch.zeros(3, 5).t()}
    checkpoint.save(state, folder, compare=True)
    checkpoint.load(state, folder)
    with SpillFile(folder, verify=True) as spill:
        spill.put(state).result()
        spill.get(state).result()
import torch.distributed.fsdp, torch.distributed.tensor.parallel
""",
    """
import hypothesis, pytest, matplotlib.pyplot, scipy.optimize
from tests.standin.build import build
build()
import cupy, kvikio
""",
)


def main() -> None:
    """Run all parts, and wait for them; what fails here is for a test to say."""
    with ThreadPoolExecutor(len(_PARTS)) as pool:
        for _ in pool.map(_run, _PARTS):
            pass


def _run(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)


if __name__ == "__main__":
    main()
