"""Finds what GPUDirect Storage does between a folder and a GPU, as opening an engine would."""

from __future__ import annotations

import sys
from typing import Any

from tensorspill.doctor.children import say

__all__ = ["look"]


def look(path: str, device: int, limit: float) -> dict[str, Any]:
    """Return the evidence, as plain data."""
    from tensorspill.gds.evidence import find

    found = find(path, device, limit)
    return {
        "works": found.works,
        "usable": found.usable,
        "why": found.why,
        "remedy": found.remedy,
        "route": found.route,
        "streams": found.streams,
        "failure": found.report.failure,
        "hung": found.report.hung,
        "steps": dict(found.report.steps),
    }


if __name__ == "__main__":
    say(look(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
