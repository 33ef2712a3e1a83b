"""What is measured: one suite a subject, each a function from a `Setting` to a `SuiteReport`."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report import SuiteReport
from benchmarks.setting import Setting

__all__ = ["Suite"]

Suite = Callable[[Setting], SuiteReport]
