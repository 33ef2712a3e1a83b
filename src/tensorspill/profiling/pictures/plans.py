"""How long writer plans take, beside simpler rules and the bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tensorspill.profiling.pictures.drawing import (
    INK,
    narrow,
    note_below,
    painting,
    say_empty,
    shortened,
    title,
)
from tensorspill.topology.writers.alternatives import RULES, alternatives
from tensorspill.topology.writers.plan import WriterPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["writer_plans"]

#: From dark to light, each with a hatch: the plan, and the rules in their order.
_LOOKS = (("#1e3a8a", ""), ("#3b82f6", "////"), ("#f59e0b", "...."), ("#fde68a", "xxxx"))


def writer_plans(plans: Mapping[str, WriterPlan], axes: Axes | None = None) -> Figure:
    """Draw how long each plan takes, in multiples of what no plan can be faster than.

    Parameters
    ----------
    plans : mapping of str to WriterPlan
        By the name to show, such as the machine's.
    axes : matplotlib.axes.Axes, optional
        Where to; by default in a new figure.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    rules = ("this plan", *(name for name, _, _ in RULES))
    high = 0.8 / len(rules)
    with painting(axes, 7.6, 1.6 + 0.75 * max(1, len(plans))) as (figure, axes):
        if not plans:
            say_empty(axes, "No plans")
            return figure
        most = 1.0
        for y, plan in enumerate(plans.values()):
            for number, span in enumerate(_times(plan)):
                at = y - 0.4 + high * (number + 0.5)
                if span is None:
                    axes.text(0.02, at, "can't be followed", va="center", fontsize=7)
                    continue
                times = span / plan.lower_bound_s if plan.lower_bound_s else 1.0
                most = max(most, times)
                colour, hatch = _LOOKS[number]
                axes.barh(at, times, 0.92 * high, color=colour, hatch=hatch, ec=INK, lw=0.5)
                text = f" {times:.3g} x, {span:.3g} s"
                axes.text(times, at, text, va="center", fontsize=7)
        axes.axvline(1.0, color=INK, lw=1.0, ls=(0, (6, 2)))
        axes.set_yticks(range(len(plans)), [shortened(name, 28) for name in plans])
        axes.set_ylim(len(plans) - 0.5, -0.5)
        axes.set_xlim(0, 1.22 * most)
        axes.set_xlabel("time to write all (multiples of the bound)")
        axes.tick_params(axis="y", length=0)
        _explain(axes, rules)
        title(axes, "Writer plans beside simpler rules")
        note_below(axes, "dashed: the bound, which no plan can beat; computed, not measured")
    return figure


def _times(plan: WriterPlan) -> list[float | None]:
    others = alternatives(plan.slices, plan.placement)
    return [plan.makespan_s, *(other.makespan_s for other in others)]


def _explain(axes: Axes, rules: tuple[str, ...]) -> None:
    import matplotlib.patches as shapes

    handles = [
        shapes.Patch(fc=colour, hatch=hatch, ec=INK, lw=0.5, label=name)
        for (colour, hatch), name in zip(_LOOKS, rules, strict=True)
    ]
    axes.figure.legend(
        handles=handles, loc="outside lower center", ncols=2 if narrow(axes) else len(handles)
    )
