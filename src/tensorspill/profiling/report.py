"""Results as one HTML page that needs nothing else: pictures, tables, and what was not measured."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tensorspill.pool.sizes import format_bytes
from tensorspill.profiling.ceilings import Ceiling
from tensorspill.profiling.host import host, now
from tensorspill.profiling.pictures.choosing import (
    OTHERS,
    alike,
    cells,
    directions,
    ours,
    smallest,
)
from tensorspill.profiling.points import DIRECTIONS
from tensorspill.profiling.rows import NOT_MEASURED, Results, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tensorspill.topology.machine import Machine

__all__ = ["missing", "report"]

#: Rows of the table; all of them are in the files.
_MOST_ROWS = 500

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2937;max-width:70rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:0}h2{margin-top:2.2rem;border-bottom:1px solid #d1d5db}
figure{margin:1rem 0}img{max-width:100%;height:auto}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{padding:.2rem .6rem;border-bottom:1px solid #e5e7eb;text-align:left;vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.soft{color:#4b5563}code{font-size:.85em;overflow-wrap:anywhere}
"""


def report(
    results: Results,
    *,
    ceilings: Mapping[str, Sequence[Ceiling]] | None = None,
    title: str = "Storage measured by tensorspill",
) -> str:
    """Return results as one HTML page, with its pictures in it.

    Parameters
    ----------
    results : Results
        Of one or several files.
    ceilings : mapping of str to sequence of Ceiling, optional
        By direction; by default those that the rows tell of.
    title : str

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    known = ceilings or {}
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="soft">made {now()} of {len(results.rows)} points, '
        f"{len(results.measured)} of them measured. Rates are decimal: 1 GB/s is 10⁹ bytes each "
        "second.</p>",
        *_summary(results),
        *_machines(results.measured or results.rows),
        *_pictures(results, known),
        *_missing(results),
        *_table(results.rows),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        # Nothing is fetched and nothing runs, whatever the files held.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _summary(results: Results) -> Iterator[str]:
    """Say in a line for each direction what is fastest, and what to set."""
    yield "<h2>In short</h2>"
    ways = directions(results.rows)
    if not ways:
        yield "<p>No point of tensorspill's engines was measured.</p>"
        return
    yield "<ul>"
    for way in ways:
        best = max(
            (row for row in ours(results.rows) if row.direction == way),
            key=lambda row: row.gbps_last_done or 0.0,
        )
        limit = ""
        if best.pct_of_ceiling is not None:
            limit = f", {best.pct_of_ceiling:.0f} % of {_text(best.ceiling_name)}"
        said = f"<b>{_text(way)}</b>: up to {best.gbps_last_done:.2f} GB/s"
        said += f" by {_text(best.engine)} ({_text(best.label)}){limit}."
        rates = cells(alike(results.rows, way))
        chosen = smallest(rates)
        if chosen is not None and len(rates) > 1:
            said += (
                f" The smallest setting within 95 % of the best of its kind: blocks of "
                f"{format_bytes(chosen[0])} and a depth of {chosen[1]} "
                f"({rates[chosen][0]:.2f} GB/s)."
            )
        yield f"<li>{said}</li>"
    yield "</ul>"


def _machines(rows: Sequence[Row]) -> Iterator[str]:
    """Describe where the rows were measured; this machine in full, others as far as rows tell."""
    yield "<h2>Where</h2>"
    found = _distinct(
        (row.host or "not said", row.device or "not known", row.fs or "not known", row.commit)
        for row in rows
    )
    yield from _listed(("machine", "device", "file system", "tensorspill"), found)
    if any(row.host == host() for row in rows):
        from tensorspill.topology.discovery.finding import discover

        yield from _described(discover())
    gpus = sorted({row.gpu for row in rows if row.gpu})
    yield f"<p>GPUs of the points: {_text(', '.join(gpus) or 'none')}.</p>"


def _distinct(found: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(found))


def _described(machine: Machine) -> Iterator[str]:
    """Describe this machine as `tensorspill topo` finds it now."""
    cpus = sorted({cpu for node in machine.nodes for cpu in node.cpus})
    memory = sum(node.memory_bytes or 0 for node in machine.nodes)
    parts = (
        ("socket", machine.sockets),
        ("CPU", cpus),
        ("NUMA node", machine.nodes),
        ("GPU", machine.gpus),
        ("NIC", machine.nics),
    )
    counts = [f"{len(of)} {what}{'' if len(of) == 1 else 's'}" for what, of in parts]
    counts.append(f"{format_bytes(memory)} of memory" if memory else "memory not known")
    yield f"<p>This is that machine now ({_text(machine.hostname)}): {', '.join(counts)}.</p>"
    rows = [
        (
            drive.name,
            drive.model or "not known",
            drive.kind or "not known",
            format_bytes(drive.capacity) if drive.capacity else "not known",
            f"{drive.link_mbps / 1e3:.2f} GB/s" if drive.link_mbps else "not known",
            "not known" if drive.numa_node is None else str(drive.numa_node),
        )
        for drive in machine.drives
    ]
    yield from _listed(("drive", "model", "kind", "size", "PCIe link", "NUMA node"), rows)


def _pictures(results: Results, known: Mapping[str, Sequence[Ceiling]]) -> Iterator[str]:
    from tensorspill.profiling.pictures.bars import limits
    from tensorspill.profiling.pictures.heat import heat_map
    from tensorspill.profiling.pictures.roof import roofline
    from tensorspill.profiling.pictures.steady import longest, steady_state
    from tensorspill.profiling.pictures.tail import latency_tail
    from tensorspill.profiling.pictures.together import tails

    rows = results.rows
    for way in directions(rows):
        yield f"<h2>{_text(way.capitalize())}</h2>"
        yield _image(heat_map(rows, direction=way), f"{way}: rate by block and depth")
        limit = known.get(way)
        yield _image(roofline(rows, direction=way, ceilings=limit), f"{way}: rate by block")
        yield _image(limits(rows, direction=way, ceilings=limit), f"{way}: rates beside limits")
        curves, about = tails(rows, way)
        if curves:
            yield _image(latency_tail(curves, about=about), f"{way}: latencies")
    row, rounds = longest(results)
    if row is not None and len(rounds) > 1:
        yield "<h2>Whether the rate holds</h2>"
        yield _image(steady_state(row, rounds), "rate of each round of the longest point")


def _image(figure: Figure, what: str) -> str:
    from tensorspill.profiling.pictures.drawing import data_uri

    return f'<figure><img alt="{_text(what)}" src="{data_uri(figure)}"></figure>'


def _missing(results: Results) -> Iterator[str]:
    yield "<h2>What was not measured</h2><ul>"
    for text in missing(results):
        yield f"<li>{_text(text)}</li>"
    yield "</ul>"


def missing(results: Results) -> list[str]:
    """Return in words what was not measured, and what can't be known from the results."""
    reasons = Counter(
        f"{row.engine} {row.direction}, {row.path_taken or NOT_MEASURED}"
        for row in results.rows
        if not row.measured
    )
    found = [
        f"{reason} ({count} points)" if count > 1 else reason for reason, count in reasons.items()
    ]
    return [*found, *_gaps(results.rows), *(f"Not read: {note}" for note in results.notes)]


def _gaps(rows: Sequence[Row]) -> Iterator[str]:
    """Yield in words what no row of the files shows."""
    own = ours(rows)
    for way in DIRECTIONS:
        if not any(row.direction == way for row in own):
            yield f"No {way} of tensorspill's engines"
    if not any(row.gpu for row in own):
        yield "GPU memory"
    if not any(row.engine == "gds" for row in own):
        yield "GPUDirect Storage"
    for name in sorted(OTHERS):
        if not any(row.engine == name for row in rows):
            yield f"{name}, to compare with"
    for text, lacking in (
        ("were compared with no limit, since none was known", lambda r: r.pct_of_ceiling is None),
        ("were read with parts in the page cache", lambda r: r.cache_dropped is False),
        ("were not compared byte for byte", lambda r: not r.verified),
        ("rest on a single round", lambda r: r.rounds < 2),
    ):
        count = sum(map(lacking, own))
        if count:
            yield f"{count} of {len(own)} points {text}"
    yield "What a drive or a hypervisor keeps in memory of its own can't be dropped, nor be seen"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "<h2>All points</h2>"
    names = ("", "", "point", "GB/s", "±", "p50 µs", "p99 µs", "max µs", "CPU %", "path", "limit")
    measured = [row for row in rows if row.measured]
    body = [
        (
            row.engine,
            row.direction,
            row.label,
            _figure(row.gbps_last_done, 2),
            _figure(row.gbps_stdev, 2),
            _figure(row.lat_us_p50),
            _figure(row.lat_us_p99),
            _figure(row.lat_us_max),
            _figure(row.cpu_pct),
            row.path_taken,
            ""
            if row.pct_of_ceiling is None
            else f"{row.pct_of_ceiling:.0f} % of {row.ceiling_name}",
        )
        for row in measured[:_MOST_ROWS]
    ]
    yield from _listed(names, body, numbers=range(3, 9))
    if len(measured) > _MOST_ROWS:
        yield f"<p>And {len(measured) - _MOST_ROWS:,} more in the files.</p>"
    commands = _distinct((row.cmd,) for row in measured if row.cmd)
    if commands:
        yield f"<p>The first of these again: <code>{_text(commands[0][0])}</code></p>"


def _figure(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _listed(
    names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()
) -> Iterator[str]:
    """Return a table; columns of `numbers` are set to the right."""
    sides = [' class="n"' if column in numbers else "" for column in range(len(names))]
    head = "".join(f"<th{side}>{_text(n)}</th>" for side, n in zip(sides, names, strict=True))
    yield f'<div class="scroll"><table><tr>{head}</tr>'
    for row in rows:
        cells_of = zip(sides, row, strict=True)
        yield "<tr>" + "".join(f"<td{side}>{_text(cell)}</td>" for side, cell in cells_of) + "</tr>"
    yield "</table></div>"
