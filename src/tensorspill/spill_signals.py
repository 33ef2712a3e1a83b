"""Holding Ctrl-C back; see `tensorspill.engine.interrupts`."""

from tensorspill.engine.interrupts import HeldInterrupts

__all__ = ["HeldInterrupts"]
