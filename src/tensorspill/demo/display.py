"""The live display while the demonstration trains."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from tensorspill.timeline import Recording

__all__ = ["Display"]

_WIDE = 72
_MEDIUM = 50


class Display:
    """Two bars: the training in memory, and the one from the drive.

    Parameters
    ----------
    console : rich.console.Console
        Where to. Nothing is drawn where it is no terminal.
    steps : int
        Of each training.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._progress = Progress(
            *_columns(console.width), console=console, disable=not console.is_terminal, expand=True
        )
        self._memory = self._progress.add_task("in memory", total=steps, state="")
        self._drive = self._progress.add_task("from drive", total=steps, state="", start=False)
        self._recorded: Recording | None = None

    def memory_step(self, number: int, loss: float) -> None:
        """Show a step of the training in memory."""
        self._progress.update(self._memory, completed=number, state=f"loss {loss:.3f}")

    def measuring(self, steps: int) -> None:
        """Show that the drive is being measured; both trainings have so many steps after all."""
        self._progress.update(self._memory, total=steps)
        self._progress.update(self._drive, total=steps, state="measuring the drive")

    def spilling(self, recorded: Recording) -> None:
        """Show the transfers of a recording from now on."""
        self._recorded = recorded
        self._progress.start_task(self._drive)

    def drive_step(self, number: int, loss: float) -> None:
        """Show a step of the training from the drive."""
        state = f"loss {loss:.3f}"
        if self._recorded is not None and self._progress.console.width >= _WIDE:
            moved = self._recorded.steps[-1]
            state += f"  {moved.gbps:.2f} GB/s  {moved.hidden_pct:.0f} % hidden"
        self._progress.update(self._drive, completed=number, state=state)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


def _columns(width: int) -> list[ProgressColumn]:
    name = TextColumn("  {task.description}")
    state = TextColumn("{task.fields[state]}", style="dim")
    if width < _MEDIUM:
        return [name, MofNCompleteColumn(), state]
    return [name, BarColumn(bar_width=None), MofNCompleteColumn(), state]
