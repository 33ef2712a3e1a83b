"""What the demonstration found out, and whether it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorspill import __version__
from tensorspill.demo.place import Mount
from tensorspill.demo.spilled import Needs, SpilledRun
from tensorspill.demo.training import Recipe, Run

__all__ = ["Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """Both runs side by side.

    Attributes
    ----------
    recipe : Recipe
        What was trained.
    text : str
        On what.
    needs : Needs
        Bytes of parameters and optimizer states.
    budget_bytes : int
        How many of them, and of gradients, may be in memory.
    folder : Path
        Where the spill file was.
    mount : Mount
        On which file system.
    memory : Run
        With all parameters in memory.
    memory_weights : str
        Digest of its parameters at the end.
    spilled : SpilledRun
        With the blocks' parameters on the drive.
    seconds : float
        Everything took.
    """

    recipe: Recipe
    text: str
    needs: Needs
    budget_bytes: int
    folder: Path
    mount: Mount
    memory: Run
    memory_weights: str
    spilled: SpilledRun
    seconds: float

    @property
    def losses_equal(self) -> bool:
        """Whether all losses are, to the last bit."""
        return self.memory.losses == self.spilled.run.losses

    @property
    def weights_equal(self) -> bool:
        """Whether all parameters are at the end, to the last bit."""
        return self.memory_weights == self.spilled.weights

    @property
    def within_budget(self) -> bool:
        """Whether parameters, gradients and states never took more memory than they may."""
        return self.spilled.peak_bytes <= self.budget_bytes

    @property
    def holds(self) -> bool:
        """Whether everything is as it should be."""
        return self.losses_equal and self.weights_equal and self.within_budget

    @property
    def drive_gbps(self) -> float:
        """What the drive gives for the same mix of reads and writes, in GB/s."""
        moved = self.spilled.moved
        return self.spilled.drive.of_mix(moved.bytes_read, moved.bytes_written) / 1e9

    @property
    def slowdown(self) -> float:
        """Time of a step from the drive over time of one in memory."""
        return self.spilled.run.seconds / self.memory.seconds

    def as_json(self) -> dict[str, Any]:
        """Return everything as one JSON object; bytes and seconds unless the name says GB/s."""
        moved = self.spilled.moved
        return {
            "version": __version__,
            "losses_equal": self.losses_equal,
            "weights_equal": self.weights_equal,
            "within_budget": self.within_budget,
            "loss": self.spilled.run.losses[-1],
            "losses": list(self.spilled.run.losses),
            "losses_in_memory": list(self.memory.losses),
            "steps": self.recipe.steps,
            "model_bytes": self.needs.model,
            "optimizer_bytes": self.needs.states,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.spilled.peak_bytes,
            "spilled_bytes": self.spilled.spilled_bytes,
            "bytes_read": moved.bytes_read,
            "bytes_written": moved.bytes_written,
            "bytes_by_path": dict(moved.by_path),
            "gbps": moved.gbps,
            "drive_gbps": self.drive_gbps,
            "drive_read_gbps": self.spilled.drive.read / 1e9,
            "drive_write_gbps": self.spilled.drive.write / 1e9,
            "hidden_pct": moved.hidden_pct,
            "transfer_seconds": moved.transfer,
            "stalled_seconds": moved.stall,
            "step_seconds": self.spilled.run.seconds / self.recipe.steps,
            "step_seconds_in_memory": self.memory.seconds / self.recipe.steps,
            "folder": str(self.folder.parent),
            "file_system": self.mount.kind,
            "device": self.mount.source,
            "seconds": self.seconds,
        }
