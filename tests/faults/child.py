"""Running a function in a forked child: limits and signals that this process should not bear."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["ChildError", "in_child", "start_child"]

Result = TypeVar("Result")


class ChildError(AssertionError):
    """The child raised, hung or was killed; the message says how."""


class Child:
    """A forked child; `result` waits for it."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe

    def result(self, timeout: float = 300) -> Any:
        """Return what the function returned."""
        deadline = time.monotonic() + timeout
        data = b""
        try:
            while select.select([self._pipe], [], [], max(0, deadline - time.monotonic()))[0]:
                more = os.read(self._pipe, 1 << 16)
                if not more:
                    break
                data += more
            else:
                raise ChildError(f"the child hung for {timeout} s")
        finally:
            os.close(self._pipe)
            status = self._end()
        if not data:
            raise ChildError(f"the child ended with {status} and without a result")
        kind, value = pickle.loads(data)
        if kind == "raised":
            raise ChildError(value)
        return value

    def kill(self) -> None:
        """End it at once, as the kernel does when memory runs out."""
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._pipe)
        os.waitpid(self.pid, 0)

    def _end(self) -> int:
        # It is done, or it hangs: a child has nothing to tidy up that the kernel does not.
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start_child(function: Callable[[], Any]) -> Child:
    """Fork a child that runs `function`, with this process's modules and compiled kernels."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run(function, writing)
    os.close(writing)
    return Child(pid, reading)


def in_child(function: Callable[[], Result], timeout: float = 300) -> Result:
    """Run `function` in a forked child and return its result.

    Raises
    ------
    ChildError
        It raised (an assertion, for instance), hung or was killed.
    """
    result: Result = start_child(function).result(timeout)
    return result


def _run(function: Callable[[], Any], pipe: int) -> None:
    try:
        # The parent's OpenMP threads are not here.
        torch.set_num_threads(1)
        threading.excepthook = lambda args: traceback.print_exception(args.exc_value)
        outcome = ("returned", function())
    except BaseException:
        outcome = ("raised", traceback.format_exc())
    try:
        data = pickle.dumps(outcome)
        while data:
            data = data[os.write(pipe, data) :]
    finally:
        # Without the parent's exit handlers and buffers.
        os._exit(0)
