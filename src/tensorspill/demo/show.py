"""Runs both trainings, shows how they go, and says what came out."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tensorspill.demo.corpus import Corpus, read_corpus
from tensorspill.demo.display import Display
from tensorspill.demo.place import find_mount, temporary_folder
from tensorspill.demo.report import Report
from tensorspill.demo.spilled import divide_budget, measure_needs, train_spilled
from tensorspill.demo.summary import introduction, summary
from tensorspill.demo.training import Recipe, train_in_memory
from tensorspill.pool.sizes import parse_bytes

__all__ = ["show"]

_TEXT_BYTES = 4 << 20
#: Parameters and optimizer states together are so many times the budget.
_TIMES_BUDGET = 5

_STEPS = 24
#: Seconds for the training in memory, unless a number of steps is asked for. On a slow or busy
#: machine both trainings are shorter.
_LIMIT = 18.0


def show(arguments: argparse.Namespace) -> int:
    """Carry out the command; return its exit status."""
    console = Console(
        stderr=arguments.json, quiet=arguments.json and not sys.stderr.isatty(), highlight=False
    )
    recipe = Recipe(steps=arguments.steps or _STEPS)
    limit = _LIMIT if arguments.steps is None else math.inf
    needs = measure_needs(recipe)
    budget = needs.total // _TIMES_BUDGET
    if arguments.budget is not None:
        budget = parse_bytes(arguments.budget)
    divide_budget(recipe, budget)  # refuses one that is too small
    corpus = read_corpus(arguments.text, _TEXT_BYTES)
    with temporary_folder(arguments.folder) as folder:
        mount = find_mount(folder)
        console.print(introduction(recipe, corpus, needs, budget, folder.parent, mount))
        report = _compare(console, recipe, limit, corpus, folder, budget)
    if arguments.json:
        print(json.dumps(report.as_json()))
    else:
        console.print(summary(report, console))
    return 0 if report.holds else 1


def _compare(
    console: Console,
    recipe: Recipe,
    limit: float,
    corpus: Corpus,
    folder: Path,
    budget: int,
) -> Report:
    begun = time.perf_counter()
    with Display(console, recipe.steps) as display:
        memory, weights = train_in_memory(recipe, corpus, display.memory_step, limit)
        recipe = replace(recipe, steps=len(memory.losses))
        display.measuring(recipe.steps)
        spilled = train_spilled(
            recipe, corpus, folder, budget, display.drive_step, display.spilling
        )
    return Report(
        recipe=recipe,
        text=corpus.name,
        needs=measure_needs(recipe),
        budget_bytes=budget,
        folder=folder,
        mount=find_mount(folder),
        memory=memory,
        memory_weights=weights,
        spilled=spilled,
        seconds=time.perf_counter() - begun,
    )
