"""Child processes that may hang or crash: each says one JSON object, within a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["Answer", "ask", "say"]

#: What a child said; ``{"problem": why}`` if it said nothing.
Answer = Mapping[str, Any]

#: Seconds that a child that was killed may take to go; one that the kernel holds stays behind.
_FAREWELL = 2.0

#: Children that did not go.
_held: list[subprocess.Popen[bytes]] = []


def ask(questions: Mapping[str, Sequence[str]], limit: float) -> dict[str, Answer]:
    """Run a module of this folder for each question, all at once; never raises.

    Parameters
    ----------
    questions : mapping of str to sequence of str
        By a name: the module, and its arguments.
    limit : float
        Seconds for each.
    """
    _held[:] = [child for child in _held if child.poll() is None]
    with ThreadPoolExecutor(max(1, len(questions)), "tensorspill-doctor") as executor:
        children: list[subprocess.Popen[bytes]] = []
        found = {
            name: executor.submit(_ask_one, question, limit, children)
            for name, question in questions.items()
        }
        try:
            return {name: future.result() for name, future in found.items()}
        except BaseException:
            # Ctrl-C: the threads end when their children have.
            for child in children.copy():
                _end_group(child)
            raise


def say(answer: Mapping[str, Any]) -> None:
    """Print what a child found, and end it at once.

    Libraries are known to crash or to wait at the end of a process.
    """
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
    sys.stdout.flush()
    os._exit(0)


def _ask_one(
    question: Sequence[str], limit: float, children: list[subprocess.Popen[bytes]]
) -> Answer:
    module, *arguments = question
    # -P: the current folder is no place to import from.
    command = [sys.executable, "-P", "-m", f"{__package__}.{module}", *arguments]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Its own children end with it.
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return {"problem": f"no process could be started to look: {error}"}
    children.append(child)
    try:
        output, complaint = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _kill(child)
        return {"problem": f"it did not answer within {limit:g} s", "hung": True}
    finally:
        children.remove(child)
    return _last_object(output) or {"problem": _how(child.returncode, complaint)}


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child and its own children, as far as the kernel lets them go."""
    _end_group(child)
    try:
        child.wait(_FAREWELL)
    except subprocess.TimeoutExpired:
        # The kernel holds it, in a call that a file system or a driver does not end.
        _held.append(child)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _end_group(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except OSError:
        pass  # it has gone


def _last_object(output: bytes) -> dict[str, Any] | None:
    for line in reversed(output.decode(errors="replace").splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue  # some library's own output
        if isinstance(found, dict):
            return found
    return None


def _how(code: int, complaint: bytes) -> str:
    how = f"signal {-code}" if code < 0 else f"status {code}"
    lines = complaint.decode(errors="replace").strip().splitlines()
    return f"the process that looked ended with {how}{f': {lines[-1].strip()}' if lines else ''}"
