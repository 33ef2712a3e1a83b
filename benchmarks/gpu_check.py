"""What a GPU makes of this library, in four minutes: whether it is right, and how fast it is.

Usage: ``python -m benchmarks.gpu_check [--folder /mnt/nvme] [--gds-dir /mnt/nvme]``. It runs the
conformance suite on tensors of torch and on arrays of CuPy, and the tests marked gpu; lets streams
compute and move at the same time; compiles the Triton kernels and compares them with what the GPU
copies; compares staging with kvikio's compatibility mode and with torch's own copy and our host
path; and watches the GPU's memory.

Whatever is missing makes a part "not measured", with the reason. The status is 0 if all was
measured and every bound is kept, 1 if something failed or a bound is not kept, and 2 if nothing
failed and something was not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# From a checkout that is not installed as well; children look there, too.
_PLACES = [str(ROOT), str(ROOT / "src")]
sys.path[:0] = [place for place in _PLACES if place not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*_PLACES, os.environ.get("PYTHONPATH")]))

import torch  # noqa: E402

from benchmarks.gpu import bandwidth, footprint, kernels, pieces, streams, tests  # noqa: E402
from benchmarks.gpu.check import Check, Outcome, Part, attempt  # noqa: E402
from benchmarks.machine import describe  # noqa: E402
from benchmarks.rows import Row, Verdict  # noqa: E402
from tensorspill.profiling.place import working_folder  # noqa: E402

__all__ = ["PARTS", "main", "measure"]

_GPU = (pieces.no_gpu, pieces.no_engine)
PARTS = (
    Part("conformance", tests.conformance, 40.0, (*_GPU, pieces.no_pytest)),
    Part("tests marked gpu", tests.marked, 20.0, (pieces.no_gpu, pieces.no_pytest)),
    Part("streams", streams.run, 10.0, _GPU),
    Part("kernels", kernels.run, 10.0, (pieces.no_gpu, pieces.no_triton)),
    Part("staging", bandwidth.staged, 15.0, _GPU),
    Part("memory", footprint.run, 5.0, _GPU),
    Part("GPUDirect Storage", bandwidth.direct, 15.0, (*_GPU, pieces.no_kvikio)),
)

_RESULTS = ROOT / "benchmarks" / "results"
_ROOM = 6 << 30
#: Seconds after the deadline when whatever hangs is given up.
_GRACE = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return the exit status."""
    options = _parse(arguments)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    begun = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    report: dict[str, Any] = {
        "machine": describe(options.folder).record(),
        "gpu": pieces.described(device),
        "parts": {},
    }
    name = re.sub(r"[^a-z0-9]+", "-", str(report["gpu"]["name"]).lower()).strip("-")
    target = options.json or _RESULTS / f"gpu-check.{name}.json"
    leftovers: list[Path] = []
    give_up = partial(_give_up, report, outcomes, target, leftovers)
    with _watchdog(begun + options.seconds + _GRACE, give_up):
        needed = _ROOM if device.type == "cuda" else 0
        with working_folder(options.folder, needed) as folder:
            leftovers.append(folder)
            deadline = begun + options.seconds
            check = Check(folder, device, deadline, options.rounds, gds=options.gds_dir)
            measure(check, outcomes, [p for p in PARTS if p.name in options.only])
    report["seconds"] = round(time.monotonic() - begun, 1)
    if options.json or any(outcome.rows for outcome in outcomes.values()):
        _write(report, outcomes, target)
    return _status(outcomes)


def measure(check: Check, outcomes: dict[str, Outcome], parts: Sequence[Part]) -> None:
    """Try each part, and print what came of it."""
    for part in parts:
        print(f"{part.name} ...", flush=True)
        outcomes[part.name] = outcome = attempt(part, check)
        for line in _lines(outcome):
            print(f"    {line}", flush=True)


def _status(outcomes: dict[str, Outcome]) -> int:
    if any(outcome.failed for outcome in outcomes.values()):
        return 1
    return 0 if all(outcome.complete for outcome in outcomes.values()) else 2


def _lines(outcome: Outcome) -> list[str]:
    lines = [_line(row) for row in outcome.rows]
    if outcome.why:
        lines.append(f"not measured: {outcome.why}")
    if outcome.error:
        lines.append(f"FAILED: {outcome.error}")
    return [*lines, *(f"note: {note}" for note in outcome.notes), f"{outcome.seconds:.1f} s"]


def _line(row: Row) -> str:
    parts = [row.case]
    if row.ours is not None:
        parts.append(f"{row.ours:.3g} {row.unit}")
    if row.theirs is not None:
        parts.append(f"{row.reference}: {row.theirs:.3g}")
    if row.ratio is not None:
        parts.append(f"ratio {row.ratio}")
    if row.bound is not None:
        parts.append(f"bound {row.bound}")
    if row.verdict is not Verdict.REPORTED:
        parts.append(row.verdict)
    return " | ".join(parts)


def _write(report: dict[str, Any], outcomes: dict[str, Outcome], target: Path) -> None:
    report["parts"] = {name: outcome.record() for name, outcome in outcomes.items()}
    report["status"] = _status(outcomes)
    target.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(f"written to {target}")


@contextmanager
def _watchdog(end: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Give up at the end, should a call into a driver never return."""
    timer = threading.Timer(max(end - time.monotonic(), 0.1), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(
    report: dict[str, Any], outcomes: dict[str, Outcome], target: Path, leftovers: list[Path]
) -> None:
    """Write what there is, and end the process."""
    outcomes["the end"] = Outcome([], [], error="a part did not end in time")
    _write(report, outcomes, target)
    for folder in leftovers:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="gpu_check", description=summary)
    parser.add_argument("--folder", default="/var/tmp", help="where the drive is (%(default)s)")
    parser.add_argument("--gds-dir", type=Path, help="a folder with GPUDirect Storage")
    parser.add_argument("--seconds", type=float, default=225.0, help="in all (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="at most (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
