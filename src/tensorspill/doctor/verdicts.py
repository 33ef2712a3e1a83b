"""Whether each backend would work in the folder, and why."""

from __future__ import annotations

from collections.abc import Sequence

from tensorspill.doctor.children import Answer
from tensorspill.doctor.row import Row, State

__all__ = ["BACKENDS", "verdicts"]

BACKENDS = ("auto", "aio", "gds")

#: Layers without which a GPU and a drive have nothing to do with each other.
_NEEDED = ("driver", "GPU", "kvikio")


def verdicts(rows: Sequence[Row], asked: Answer, here: bool) -> tuple[Row, ...]:
    """Return a row for each backend: "ok" only where it was tried, and works."""
    if not here:
        why = "only what was tried counts, and this is a tree of another machine"
        return tuple(Row(name, "unknown", why) for name in BACKENDS)
    layers = {row.layer: row for row in rows}
    aio, gds = _aio(layers), _gds(layers, asked)
    chosen = gds if gds.state == "ok" else aio
    auto = Row("auto", chosen.state, f"{chosen.layer}: {chosen.evidence}", chosen.remedy)
    return auto, aio, gds


def _aio(layers: dict[str, Row]) -> Row:
    """Judge the host path: it works wherever a file can be written."""
    folder = layers["folder"]
    if folder.state != "ok":
        return Row("aio", folder.state, folder.evidence, folder.remedy)
    for name in ("O_DIRECT alignment", "AIO limits"):
        row = layers[name]
        if row.state == "no":
            return Row("aio", "ok", f"works, not at its best: {row.evidence}", row.remedy)
    return Row("aio", "ok", "works, past the page cache")


def _gds(layers: dict[str, Row], asked: Answer) -> Row:
    """Judge GPUDirect Storage, by what a transfer between the folder and the GPU did."""
    folder = layers["folder"]
    if folder.state != "ok":
        return Row("gds", folder.state, folder.evidence, folder.remedy)
    remedy = next((layers[name].remedy for name in _NEEDED if layers[name].state == "no"), "")
    if "why" in asked:
        state: State = "ok" if asked["works"] else "no"
        return Row("gds", state, str(asked["why"]), remedy or str(asked["remedy"]))
    said = str(asked.get("problem", "it was not tried"))
    lacks = asked.get("hung") or asked.get("lacking")
    return Row("gds", "no" if lacks else "unknown", f"no GPUDirect Storage: {said}", remedy)
