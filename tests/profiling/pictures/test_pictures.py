"""Pictures: what is drawn is what was measured, with units, readable in grey and when narrow."""

import itertools
import math
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from tensorspill.engine.latencies import Latencies
from tensorspill.errors import BrokenError
from tensorspill.profiling import pictures
from tensorspill.profiling.ceilings import Ceiling
from tensorspill.profiling.pictures import bars, plans, steps
from tensorspill.profiling.pictures.affinity import _look
from tensorspill.profiling.pictures.choosing import alike, cells, derived_ceilings, smallest
from tensorspill.profiling.pictures.drawing import ink_on, look, new_figure, shades, shortened
from tensorspill.profiling.pictures.steady import longest
from tensorspill.profiling.rows import Results, Row
from tensorspill.timeline import Span, StepRecord, Timeline
from tensorspill.topology import affinities, place_on, plan_writers
from tensorspill.topology.affinity import rank_distance
from tensorspill.topology.machines import cluster, machine, names
from tensorspill.topology.ranks.grid import ParallelLayout
from tensorspill.topology.writers.model_state import model_state
from tests.profiling.pictures.rows import BLOCKS, DEPTHS, KIB, MIB, grid, row

LIMITS = [
    Ceiling("PCIe link of nvme0n1 + nvme1n1 + nvme2n1 + nvme3n1", 28.1, "as given"),
    Ceiling("nvme0n1's own read rate", 7.0, "as given for the drive"),
    Ceiling("fio read 1MiB x 32 aligned", 6.4, "measured in the same rounds"),
    Ceiling("host copy", 6.45, "measured: memmove in one thread"),
    Ceiling("PCIe link of GPU 0000:17:00.0", None, "not known: no such file"),
]


def timeline(spans, seconds=1.0):
    step = StepRecord(1, 10.0, seconds, 0.6, 0.2, 0.5, 0.4, 10**8, 10**7, {"direct": 10**8})
    return Timeline((step,), tuple(spans), 0, 10**8, 10**7)


SPANS = [
    Span("compute", "forward", 10.0, 10.4, 1),
    Span("stall", "parameters", 10.4, 10.6, 1),
    Span("transfer", "parameters", 9.9, 10.3, 0, 10**6),
    Span("transfer", "parameters", 10.1, 10.5, 0, 10**6),
    Span("transfer", "parameters", 10.35, 10.5, 0, 10**6),
    Span("transfer", "parameters", 10.2, 11.5, 0, 10**6, True),
]


def plan(kind="plain", nodes=2):
    where = place_on(cluster(kind, nodes))
    return plan_writers(model_state(ParallelLayout(dp=where.ranks), params=10**6), where)


#: Every panel, by what is drawn into the axes given.
PANELS = {
    "heat": lambda axes: pictures.heat_map(grid(), axes),
    "roofline": lambda axes: pictures.roofline(grid(), axes, ceilings=LIMITS),
    "limits": lambda axes: pictures.limits(grid(), axes, ceilings=LIMITS),
    "tail": lambda axes: pictures.latency_tail({"a": row(), "b": tail(2000)}, axes),
    "overlap": lambda axes: pictures.overlap(timeline(SPANS), axes),
    "steady": lambda axes: pictures.steady_state(row(), [2.0, 2.1, 1.9] * 9, axes),
    "affinity": lambda axes: pictures.affinity_matrix(machine("dgx-h100"), axes),
    "plans": lambda axes: pictures.writer_plans({"two machines of a kind": plan()}, axes),
}
EMPTY = {
    "heat": lambda: pictures.heat_map([]),
    "roofline": lambda: pictures.roofline([]),
    "limits": lambda: pictures.limits([]),
    "tail": lambda: pictures.latency_tail({}),
    "overlap": lambda: pictures.overlap(Timeline((), (), 0, 0, 0)),
    "no such step": lambda: pictures.overlap(timeline(SPANS), step=7),
    "steady": lambda: pictures.steady_state(None),
    "no rounds": lambda: pictures.steady_state(row(), []),
    "plans": lambda: pictures.writer_plans({}),
    "overview": lambda: pictures.overview(Results()),
}


def tail(count):
    return Latencies.of([1e-4 * (1 + number / count) ** 8 for number in range(count)])


def axes_of(figure) -> Any:
    return figure.get_axes()[0]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def boxes(figure, artists):
    """Return where artists are painted, in pixels."""
    figure.draw_without_rendering()
    # Of an annotation without its arrow.
    return [Text.get_window_extent(artist) for artist in artists]


def overlapping(one, other):
    return (
        one.x0 < other.x1 - 0.5
        and other.x0 < one.x1 - 0.5
        and one.y0 < other.y1 - 0.5
        and other.y0 < one.y1 - 0.5
    )


# -- which rows ----------------------------------------------------------------------------------


def test_only_points_that_differ_in_block_and_depth_share_a_picture():
    others = [
        row(rate=9.0, threads=2),
        row(rate=9.0, gpu="cuda:0"),
        row(rate=9.0, engine="fio"),
        row(rate=9.0, direction="write"),
        row(rate=9.0, host="another"),
        row(rate=9.0, cmd="tensorspill bench /mnt --direction read --tensor 4KiB"),
        row(rate=None, block=8 * MIB),
    ]
    wanted = grid()
    assert set(alike([*others, *wanted])) == set(wanted)
    assert [each.direction for each in alike([*others, *wanted], "write")] == ["write"]
    assert alike([row(rate=None)]) == ()


def test_reads_come_first_where_both_have_as_many():
    assert alike([*grid("write"), *grid()])[0].direction == "read"


def test_the_smallest_good_enough_has_the_fewest_bytes_in_flight():
    rates = cells(grid())
    # From 16 MiB in flight on, it is as fast as it gets.
    assert smallest(rates) in {(MIB, 16), (4 * MIB, 4), (256 * KIB, 64)}
    assert smallest(rates) == (4 * MIB, 4)  # of those, the one with the fewest operations
    assert smallest({}) is None
    assert smallest({(4096, 1): (0.0, 0.0)}) == (4096, 1)


def test_a_point_that_was_measured_twice_has_the_median_and_its_spread():
    rates = cells([row(rate=1.0), row(rate=3.0)])
    assert rates[MIB, 16] == pytest.approx((2.0, math.sqrt(2)))


def test_limits_are_derived_from_what_rows_are_in_per_cent_of():
    rows = [row(rate=3.5), row(rate=3.4, engine="fio", depth=32, pct_of_ceiling=None)]
    found = {limit.name: limit.gbps for limit in derived_ceilings(rows, "read")}
    assert found == {"PCIe link of nvme0n1": pytest.approx(7.0), "fio read 1MiB x 32": 3.4}
    assert derived_ceilings(rows, "write") == ()


# -- all panels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_has_units_and_goes_where_it_is_told(name, tmp_path):
    with look():
        figure = new_figure(7, 5, layout="constrained")
        axes = figure.add_subplot()
    assert PANELS[name](axes) is figure
    words = " ".join([axes.get_xlabel(), axes.get_ylabel()])
    units = {
        "heat": ("operations", "bytes"),
        "roofline": ("GB/s, decimal", "bytes"),
        "limits": ("GB/s, decimal",),
        "tail": ("µs", "percentile"),
        "overlap": ("ms",),
        "steady": ("(s;", "GB/s, decimal"),
        "affinity": ("rank", "device"),
        "plans": ("multiples of the bound",),
    }
    for unit in units[name]:
        assert unit in words
    pictures.save(figure, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", PANELS)
@pytest.mark.thorough
def test_a_small_panel_keeps_its_words_inside(name):
    with look():
        figure = new_figure(4.2, 3.2, layout="constrained")
        axes: Any = figure.add_subplot()
        PANELS[name](axes)
        shown = [axes.title, axes._left_title, axes.xaxis.label]
        for box in boxes(figure, shown):
            assert box.x0 >= -2
            assert box.x1 <= figure.bbox.width + 2


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_measured_is_said(name):
    figure = EMPTY[name]()
    said = " ".join(text for axes in figure.get_axes() for text in texts(axes))
    assert "no" in said.lower()


def test_the_same_picture_has_the_same_bytes():
    rows = grid()
    first, second = (pictures.data_uri(pictures.heat_map(rows)) for _ in range(2))
    assert first == second
    assert first.startswith("data:image/svg+xml;base64,")


def test_names_that_look_like_formulas_or_need_other_fonts_are_drawn_as_they_are():
    hostile = "$\\frac{1}$ _^ \u6d4b\u8bd5 \x1b[31m " + 80 * "n"
    rows = [row(host=hostile, device=hostile, ceiling_name=hostile, engine="a$i_o$")]
    for draw in (pictures.heat_map, pictures.roofline, pictures.limits):
        assert pictures.data_uri(draw(rows))
    assert pictures.data_uri(pictures.latency_tail({hostile: row()}, about=(hostile,)))


def test_a_picture_that_can_not_be_written_says_where(tmp_path):
    with pytest.raises(BrokenError, match="picture") as caught:
        pictures.save(pictures.heat_map([]), tmp_path / "no" / "x.png")
    assert caught.value.path == str(tmp_path / "no" / "x.png")


def test_one_row_and_one_picture_of_everything(tmp_path):
    pictures.draw_results(Results((row(),), ((2.0,),)), str(tmp_path / "one.png"))
    both = Results((*grid(), *grid("write")), tuple(() for _ in range(2 * len(grid()))))
    figure = pictures.overview(both, ceilings={"read": LIMITS})
    assert len(figure.get_axes()) == 10  # four panels and a scale for each direction
    assert (tmp_path / "one.png").stat().st_size > 10_000


# -- grey ----------------------------------------------------------------------------------------


def grey(colour):
    red, green, blue = to_rgb(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(
    "looks",
    [
        (bars._OURS, bars._MEASURED, bars._KNOWN),
        tuple(steps._LOOKS.values()),
        plans._LOOKS,
    ],
)
def test_what_differs_differs_in_grey_as_well(looks):
    for (one, hatch), (other, another) in itertools.combinations(looks, 2):
        assert hatch != another or abs(grey(one) - grey(other)) > 0.2


def test_curves_have_markers_of_their_own_and_get_lighter():
    found = shades(7)
    assert len({marker for _, marker in found}) == 7
    lights = [grey(colour[:3]) for colour, _ in found]
    assert lights == sorted(lights)


def test_words_on_colours_are_readable():
    import matplotlib as mpl

    colours = mpl.colormaps["cividis"]
    for number in range(0, 256, 5):
        fill = colours(number)
        ink = ink_on(fill)
        light = [_linear(channel) for channel in fill[:3]]
        luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]
        contrast = 1.05 / (luminance + 0.05) if ink == "white" else (luminance + 0.05) / 0.05
        assert contrast >= 4.5
    assert _look("?", colours)[2]  # what is not known is hatched


def _linear(channel):
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


# -- A -------------------------------------------------------------------------------------------


def cell_of(axes, block, depth):
    ticks = [text.get_text() for text in axes.get_yticklabels()]
    columns = [text.get_text() for text in axes.get_xticklabels()]
    names = {64 * KIB: "64 KiB", 256 * KIB: "256 KiB", MIB: "1 MiB", 4 * MIB: "4 MiB"}
    return columns.index(str(depth)), ticks.index(names[block])


def test_each_cell_holds_its_rate_and_missing_ones_are_hatched():
    missing = ((MIB, 1), (4 * MIB, 64))
    rows = grid(without=missing)
    figure = pictures.heat_map(rows)
    axes = axes_of(figure)
    written = {
        tuple(text.get_position()): text.get_text() for text in axes.texts if text.axes is axes
    }
    for each in rows:
        where = cell_of(axes, each.block_bytes, each.depth)
        assert written[where].startswith(f"{each.gbps_last_done:.2f}")
    hatched = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_hatch()]
    places = {(round(p.get_x() + 0.5), round(p.get_y() + 0.5)) for p in hatched}
    assert places == {cell_of(axes, *cell) for cell in missing}
    assert axes.get_images()[0].get_array().count() == len(rows)


@pytest.mark.parametrize("chosen", [None, (64 * KIB, 4)])
def test_the_chosen_point_is_in_the_box(chosen):
    figure = pictures.heat_map(grid(), chosen=chosen)
    axes = axes_of(figure)
    framed = [p for p in axes.patches if isinstance(p, Rectangle) and not p.get_fill()]
    framed = framed or [p for p in axes.patches if p.get_linewidth() > 1]
    places = {(round(p.get_x() + 0.47), round(p.get_y() + 0.47)) for p in framed}
    assert places == {cell_of(axes, *(chosen or (4 * MIB, 4)))}
    assert ("64 KiB x 4" if chosen else "4 MiB x 4") in axes.get_xlabel()


# -- B -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(7.6, 4.6), (5.0, 2.6)])
@pytest.mark.parametrize("case", ["usual", "together", "many", "long", "one"])
def test_labels_of_limits_never_overlap_and_stay_inside(case, size):
    ceilings = {
        "usual": LIMITS,
        "together": [Ceiling(f"limit {n}", 6.4 + 0.001 * n, "x") for n in range(4)],
        "many": [Ceiling(f"limit {n}", 1.2**n, "x") for n in range(24)],
        "long": [Ceiling(60 * "name " + str(n), 3.0 + n, "x") for n in range(3)],
        "one": [Ceiling("far above", 5000.0, "x")],
    }[case]
    with look():
        figure = new_figure(*size, layout="constrained")
        axes: Any = figure.add_subplot()
        pictures.roofline(grid(), axes, ceilings=ceilings)
        found = boxes(figure, [text for text in axes.texts if "GB/s" in text.get_text()])
        paper = axes.get_window_extent()
        assert found
        assert not any(overlapping(*pair) for pair in itertools.combinations(found, 2))
        for box in found:
            assert box.x0 >= paper.x1
            assert box.x1 <= figure.bbox.width + 1
            assert -1 <= box.y0 <= box.y1 <= figure.bbox.height + 1
    lines = [line for line in axes.get_lines() if len(set(line.get_ydata())) == 1]
    known = sorted(limit.gbps for limit in ceilings if limit.gbps)
    drawn = sorted({float(line.get_ydata()[0]) for line in lines if len(line.get_xdata()) == 2})
    assert drawn == known[: len(drawn)]
    if len(drawn) < len(known):
        assert any(f"and {len(known) - len(drawn)} higher" in text for text in texts(axes))


def test_there_is_a_curve_for_each_depth_with_its_rates():
    axes = axes_of(pictures.roofline(grid(), ceilings=LIMITS))
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == [str(depth) for depth in DEPTHS]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    curves = [c.lines[0] for c in axes.containers]
    assert list(curves[0].get_xdata()) == list(BLOCKS)
    wanted = {(r.block_bytes, r.gbps_last_done) for r in grid() if r.depth == DEPTHS[0]}
    assert set(zip(curves[0].get_xdata(), curves[0].get_ydata(), strict=True)) == wanted
    assert "not known: PCIe link of GPU" in axes.get_xlabel()


# -- C -------------------------------------------------------------------------------------------


def test_every_limit_has_a_bar_or_says_why_not():
    rows = [*grid(), row(engine="gdsio", rate=None, path_taken="not measured: not installed")]
    axes = axes_of(pictures.limits(rows, ceilings=LIMITS))
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names[0].startswith("aio, ")
    known = sorted((limit for limit in LIMITS if limit.gbps), key=lambda limit: limit.gbps or 0.0)
    assert names[1:] == [shortened(limit.name, 30) for limit in [*known, LIMITS[-1]]] + ["gdsio"]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [6.0, *(limit.gbps for limit in known)]
    said = texts(axes)
    assert "6.00 GB/s, 94 % of the tightest limit" in said
    assert "not known: no such file" in said
    assert "not measured: not installed" in said


# -- D -------------------------------------------------------------------------------------------


def test_the_tail_ends_where_there_are_no_operations_to_tell():
    axes = axes_of(pictures.latency_tail({"few": tail(500), "many": tail(20_000)}))
    solid = [line for line in axes.get_lines() if line.get_linestyle() == "-"]
    dotted = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
    ends = [10 ** -float(line.get_xdata()[-1]) for line in solid]
    # One in five hundred, one in ten thousand.
    assert ends == [pytest.approx(0.002), pytest.approx(0.0001)]
    assert len(dotted) == 1
    assert "500 operations" in axes.get_xlabel()
    assert solid[1].get_ydata()[0] == pytest.approx(1e6 * tail(20_000).percentile(50))


def test_a_row_gives_three_percentiles_and_the_slowest():
    axes = axes_of(pictures.latency_tail({"row": row(total_bytes=MIB * 4000)}))
    points = [list(line.get_ydata()) for line in axes.get_lines()]
    assert points == [[100.0, 400.0, 900.0], [2000.0]]


# -- E -------------------------------------------------------------------------------------------


def test_transfers_at_the_same_time_are_beside_each_other_and_cut_at_the_step():
    lanes: Any = steps._lanes(SPANS, timeline(SPANS).steps[0])
    assert lanes["compute"] == [pytest.approx((0, 400, 0))]
    assert lanes["waiting"] == [pytest.approx((400, 200, 0))]
    assert [place for _, _, place in lanes["read"]] == [0, 1, 0]
    assert lanes["read"][0][:2] == pytest.approx((0, 300))
    assert lanes["write"] == [pytest.approx((200, 800, 0))]
    axes = axes_of(pictures.overlap(timeline(SPANS)))
    assert axes.get_xlim() == (0, 1000)
    assert "60 % compute, 20 % waiting for the drive, 20 % neither" in axes.get_xlabel()


def test_many_transfers_at_once_share_the_last_place():
    spans = [Span("transfer", "x", 10.0, 10.5 + 0.01 * n, 0, 1) for n in range(40)]
    lanes: Any = steps._lanes(spans, timeline(spans).steps[0])
    assert max(place for _, _, place in lanes["read"]) == steps._DEEP - 1
    pictures.data_uri(pictures.overlap(timeline(spans)))


# -- F -------------------------------------------------------------------------------------------


def test_each_round_takes_the_time_that_it_took():
    rates = [2.0, 1.0, 0.5]
    figure = pictures.steady_state(row(total_bytes=10**9), rates)
    axes = axes_of(figure)
    [steps] = [patch for patch in axes.patches if hasattr(patch, "get_data")]
    values, edges, _ = steps.get_data()
    assert list(values) == rates
    assert list(edges) == [0, 0.5, 1.5, 3.5]
    assert "3 of 60 s: too short" in axes.get_xlabel() or "4 of 60 s" in axes.get_xlabel()


def test_a_drive_that_gets_slower_is_told():
    rates = 30 * [2.0] + 60 * [1.0]
    axes = axes_of(pictures.steady_state(row(total_bytes=10**9), rates))
    assert "the last third against the first: -50 %" in axes.get_xlabel()
    assert "too short" not in axes.get_xlabel()


def test_the_point_that_was_measured_longest_is_found():
    rows = (row(rate=1.0), row(rate=2.0), row(rate=None))
    results = Results(rows, ((1.0, 1.0), (2.0, 2.0, 2.0, 2.0, 2.0), ()))
    assert longest(results) == (rows[1], results.rounds[1])
    assert longest(Results()) == (None, ())


# -- G -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
@pytest.mark.thorough
def test_every_known_machine_has_a_matrix_of_its_distances(name):
    known = machine(name)
    ranks = affinities(known)
    axes = axes_of(pictures.affinity_matrix(known))
    devices = known.devices
    order: list[Any] = [*known.gpus, *known.nics, *known.drives]
    assert len(order) == len(devices)
    written = {t.get_position(): t.get_text() for t in axes.texts if type(t) is Text}
    for y, rank in enumerate(ranks):
        for x, device in enumerate(order):
            assert written[x, y] == rank_distance(known, rank, device).label


def test_a_rank_without_a_gpu_has_distances_from_its_cpus():
    known = machine("plain")
    [rank] = affinities(known, [None])
    axes = axes_of(pictures.affinity_matrix(known, ranks=[rank]))
    assert "NODE" in texts(axes) or "PHB" in texts(axes)


# -- importing -----------------------------------------------------------------------------------


def test_matplotlib_is_imported_late():
    code = (
        "import sys, tensorspill.profiling.pictures, tensorspill.profiling.report;"
        "assert not {'matplotlib', 'IPython'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.thorough
def test_without_matplotlib_it_is_said_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from tensorspill.errors import UnsupportedError\n"
        "from tensorspill.profiling.pictures import heat_map\n"
        "try: heat_map([])\n"
        "except UnsupportedError as error: assert 'notebook' in error.remedy, error\n"
        "else: raise SystemExit('drawn')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_row_of_an_old_file_can_be_drawn():
    old = Row.from_json(
        {"ts": "", "host": "", "commit": "", "path_taken": "", "engine": "aio",
         "direction": "read", "block_bytes": MIB, "depth": 4, "gbps_last_done": 1.5}
    )  # fmt: skip
    pictures.data_uri(pictures.overview(Results((old,), ((),))))
