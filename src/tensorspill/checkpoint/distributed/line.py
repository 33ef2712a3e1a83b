"""The one thread that talks to the store in which ranks tell each other where they are.

A call to a store can hang for good, when its server is stopped or gone, so no other thread makes
any. Who waits for an answer waits for this thread, and gives up when it does not come back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tensorspill.errors import OutcomeUnknownError, SpillError

__all__ = ["Line", "Store", "read_all"]

#: A `torch.distributed.Store`; typed loosely, since its stubs differ by release.
Store = Any

_SOON, _LATER = 0.0005, 0.05
_LOST = "The store through which ranks talk is lost"
_LOST_REMEDY = (
    "Look which checkpoint is the latest: it is whole. With torchrun the store outlives every "
    "rank; elsewhere it usually ends with rank 0"
)


@dataclass(eq=False)
class _Question:
    question: Callable[[Store], Any]
    answer: Future[Any]
    anyway: bool


class Line:
    """Runs questions to a store, each until it has an answer, and something else at intervals.

    Parameters
    ----------
    store : Store
    interval : float
        Seconds between two calls of `regularly`.
    timeout : float
        Seconds without any answer from the store after which it counts as lost.
    regularly : callable
        Called with the store.
    """

    def __init__(
        self,
        store: Store,
        interval: float,
        timeout: float,
        regularly: Callable[[Store], None],
    ) -> None:
        self._store = store
        self._interval, self._timeout = interval, timeout
        self._regularly = regularly
        self._closed = False
        self._changed = threading.Condition()
        self._questions: list[_Question] = []
        self._error: SpillError | None = None
        self._ended = False
        self._alive = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tensorspill-ranks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(
        self,
        question: Callable[[Store], Any],
        *,
        anyway: bool = False,
        patience: float | None = None,
    ) -> Any:
        """Run a question until it returns something else than None, and return that.

        Parameters
        ----------
        question : callable
            Called with the store, again and again.
        anyway : bool
            Even if `fail` was called.
        patience : float, optional
            Seconds after which None is returned.

        Raises
        ------
        OutcomeUnknownError
            The store is lost.
        SpillError
            What `fail` was called with, unless `anyway`.
        """
        entry = _Question(question, Future(), anyway)
        with self._changed:
            if self._error is not None and (self._ended or not anyway):
                raise self._error
            self._questions.append(entry)
            self._changed.notify()
        until = None if patience is None else time.monotonic() + patience
        while True:
            now = time.monotonic()
            if until is not None and now >= until:
                self._remove(entry)
                return None
            try:
                return entry.answer.result(
                    min(self._timeout, 1.0, max((until or now + 1) - now, 0))
                )
            except TimeoutError:
                if time.monotonic() - self._alive > self._timeout:
                    raise _lost() from None

    def fail(self, error: SpillError) -> None:
        """Let all questions, those to come as well, end with an error."""
        with self._changed:
            self._error = self._error or error
            over = [q for q in self._questions if self._ended or not q.anyway]
            self._questions = [q for q in self._questions if q not in over]
        for question in over:
            question.answer.set_exception(self._error)

    def close(self) -> None:
        """Stop the thread; a second time does no harm. One that hangs in the store is left."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        due, delay = 0.0, _SOON
        try:
            while not self._closed:
                now = time.monotonic()
                if now >= due:
                    self._regularly(self._store)
                    due = now + self._interval
                delay = _SOON if self._answer() else min(delay * 1.5, _LATER)
                self._alive = time.monotonic()
                with self._changed:
                    if not self._closed:
                        rest = max(due - self._alive, 0)
                        fresh = len(self._questions)
                        self._changed.wait(min(delay, rest) if fresh else rest)
                        if len(self._questions) > fresh:
                            delay = _SOON
        except Exception as error:
            lost = _lost()
            lost.__cause__ = error
            self._ended = True
            self.fail(lost)

    def _answer(self) -> bool:
        """Try all questions once; return whether one was answered."""
        with self._changed:
            waiting = list(self._questions)
        some = False
        for entry in waiting:
            found = entry.question(self._store)
            if found is not None and self._remove(entry):
                entry.answer.set_result(found)
                some = True
        return some

    def _remove(self, entry: _Question) -> bool:
        with self._changed:
            if entry not in self._questions:
                return False  # it ended with an error meanwhile
            self._questions.remove(entry)
            return True


def _lost() -> OutcomeUnknownError:
    return OutcomeUnknownError(_LOST, remedy=_LOST_REMEDY)


def read_all(store: Store, keys: Sequence[str]) -> list[bytes] | None:
    """Return the values of all keys, or None if one is not there yet; does not wait."""
    if not keys:
        return []
    if not store.check(list(keys)):
        return None
    if store.has_extended_api():
        return list(store.multi_get(list(keys)))
    return [store.get(key) for key in keys]
