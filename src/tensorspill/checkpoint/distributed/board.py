"""What ranks tell each other during one save: who is here, who makes progress, how it ended.

Keys in the store, each save with its own prefix:

=================  =================================================================
``here/<rank>``    what a rank brings: its digest of what it holds, or its error
``go``             the coordinator (rank 0 of the group): how to go on
``beat/<rank>``    a count that grows while the rank makes progress
``done/<rank>``    what the rank wrote, or all that it has to say
``verdict``        at first absent; then ``commit`` or an error, whichever comes first; after
                   ``commit`` the outcome
=================  =================================================================

Whoever finds that the save has failed, since it failed itself or since a rank made no progress for
`timeout` seconds, puts an error where there is no verdict. The coordinator commits only after it
has put ``commit`` there. So either all survivors raise the same error and nothing is committed, or
the commit was begun; if the coordinator is lost then, the outcome is unknown to all.

Who is slow makes progress, and may take as long as it needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tensorspill.checkpoint.distributed.line import Line, Store, read_all
from tensorspill.checkpoint.distributed.wire import decode_error, encode_error
from tensorspill.errors import OutcomeUnknownError, RankFailedError, SpillError

__all__ = ["Board"]

_COMMIT, _OUTCOME, _ERROR = b"commit", b"outcome:", b"error:"

#: Of a value in the store; some servers refuse larger messages.
_PIECE = 1 << 20

#: Seconds that rank 0 stays for others that should have left.
_FAREWELL = 5.0

logger = logging.getLogger(__name__)


class Board:
    """One rank's view of one save.

    Parameters
    ----------
    store : Store
        With a prefix of its own for this save.
    rank, size : int
        In the group.
    timeout : float
        Seconds without progress after which a rank fails the save.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._lock = threading.Lock()
        self._progress = 0
        self._working = False
        self._error: SpillError | None = None
        self._committing = False
        self._said: set[str] = set()
        self._left = self._forgotten = False
        # The coordinator watches all, the others watch the coordinator.
        watched = range(size) if rank == 0 else (0,)
        self._seen = {r: (b"", time.monotonic()) for r in watched if r != rank}
        self._line = Line(store, min(timeout / 10, 2.0), timeout, self._tick)
        self._line.start()

    # -- progress ------------------------------------------------------------------------------

    def working(self, working: bool) -> None:
        """Say whether from now on only `advance` counts as progress; else being alive does."""
        with self._lock:
            self._working = working
            self._progress += 1

    def advance(self, _: int = 0) -> None:
        """Note progress; raises if the save has failed meanwhile."""
        if self._error is not None:
            raise self._error
        self._progress += 1

    def check(self) -> None:
        """Raise if the save has failed."""
        if self._error is not None:
            raise self._error

    # -- what is said --------------------------------------------------------------------------

    def say(self, topic: str, data: bytes) -> None:
        """Publish something of this rank under a topic."""
        key = f"{topic}/{self.rank}"
        pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]

        def put(store: Store) -> bool:
            for number, piece in enumerate(pieces):
                store.set(f"{key}/{number}", piece)
            # Last, since it tells that all are there.
            store.set(key, str(len(pieces)))
            self._said.update((key, *(f"{key}/{number}" for number in range(len(pieces)))))
            return True

        self._line.ask(put)

    def hear(self, topic: str, ranks: Sequence[int]) -> list[bytes]:
        """Wait until these ranks have said something under a topic, and return it."""

        def get(store: Store) -> list[bytes] | None:
            counts = read_all(store, [f"{topic}/{rank}" for rank in ranks])
            if counts is None:
                return None
            keys = [
                [f"{topic}/{rank}/{number}" for number in range(int(count))]
                for rank, count in zip(ranks, counts, strict=True)
            ]
            if self.rank == 0:
                self._said.update(f"{topic}/{rank}" for rank in ranks)
                self._said.update(name for names in keys for name in names)
            return [b"".join(read_all(store, names) or ()) for names in keys]

        found: list[bytes] = self._line.ask(get)
        return found

    def hear_all(self, topic: str) -> list[bytes]:
        """Wait until all ranks have said something under a topic."""
        return self.hear(topic, range(self.size))

    # -- how it ends ---------------------------------------------------------------------------

    def fail(self, error: SpillError) -> SpillError:
        """Let the save fail, unless it has ended before; return what to raise."""
        try:
            self._line.ask(lambda store: self._give(store, _ERROR + encode_error(error).encode()))
        except SpillError as other:
            return other
        return self._error or self._unknown()

    def claim(self) -> None:
        """Take the decision to commit; only the coordinator does.

        Raises
        ------
        SpillError
            The save has failed.
        """
        self._line.ask(lambda store: self._give(store, _COMMIT))
        self.check()

    def conclude(self, outcome: bytes | SpillError) -> None:
        """Say how the commit ended; only after `claim`."""
        if isinstance(outcome, bytes):
            value = _OUTCOME + outcome
        else:
            value = _ERROR + encode_error(outcome).encode()
        self._line.ask(lambda store: store.set("verdict", value) or True)

    def outcome(self) -> bytes:
        """Wait for the coordinator's outcome, and return it.

        Raises
        ------
        SpillError
            The save has failed, at whichever rank.
        OutcomeUnknownError
            The coordinator was lost while it committed.
        """

        def get(store: Store) -> bytes | None:
            value = self._verdict(store)
            return value.removeprefix(_OUTCOME) if value.startswith(_OUTCOME) else None

        found: bytes = self._line.ask(get)
        return found

    def _leave(self) -> None:
        """Let rank 0 go last: with it may end the store, from which all others have to read."""
        lost = self._error.ranks if isinstance(self._error, RankFailedError) else ()
        others = [f"left/{rank}" for rank in range(1, self.size) if rank not in lost]
        try:
            if self.rank:
                self._line.ask(
                    lambda store: store.set(f"left/{self.rank}", "") or True, anyway=True
                )
                return
            patience = min(self.timeout, _FAREWELL)
            left = self._line.ask(lambda s: read_all(s, others), anyway=True, patience=patience)
            # Whoever was only stopped has to find the verdict when it goes on.
            if left is not None and len(left) == self.size - 1:
                self._line.ask(self._forget, anyway=True)
        except SpillError:
            logger.warning("The store was lost after the end of a save")

    def close(self) -> None:
        """Say no more; a second time does no harm.

        Rank 0 waits for the others, but not for long for those that may be lost; then it removes
        all keys.
        """
        if not self._left:
            self._left = True
            try:
                self._leave()
            finally:
                self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- in the line's thread ------------------------------------------------------------------

    def _forget(self, store: Store) -> bool:
        self._forgotten = True
        for name in self._said:
            store.delete_key(name)
        ends = [f"{topic}/{rank}" for topic in ("beat", "left") for rank in range(self.size)]
        for name in (*ends, "verdict"):
            store.delete_key(name)
        return True

    def _tick(self, store: Store) -> None:
        if self._forgotten:
            return
        with self._lock:
            if not self._working:
                self._progress += 1
            count = self._progress
        store.set(f"beat/{self.rank}", str(count))
        self._verdict(store)
        if self._error is None:
            self._watch(store)

    def _watch(self, store: Store) -> None:
        now = time.monotonic()
        for rank, (last, since) in self._seen.items():
            value = (read_all(store, [f"beat/{rank}"]) or [b""])[0]
            if value != last:
                self._seen[rank] = value, now
            elif now - since > self.timeout:
                self._seen[rank] = value, now
                self._stalled(store, rank)
                return

    def _stalled(self, store: Store, rank: int) -> None:
        if self._committing and self.rank:
            self._end(self._unknown())
            return
        lost = sorted(
            r
            for r, (_, since) in self._seen.items()
            if r == rank or time.monotonic() - since > self.timeout / 2
        )
        many = f"Ranks {', '.join(map(str, lost))}" if len(lost) > 1 else f"Rank {rank}"
        error = RankFailedError(
            f"{many} made no progress for {self.timeout:g} s",
            remedy="Nothing was committed; see what became of it, or allow a longer timeout",
        )
        error.ranks = tuple(lost)
        self._give(store, _ERROR + encode_error(error).encode())

    def _give(self, store: Store, verdict: bytes) -> bool:
        """Give a verdict where there is none."""
        store.compare_set("verdict", "", verdict.decode())
        self._verdict(store)
        return True

    def _verdict(self, store: Store) -> bytes:
        """Look at the verdict; an error ends everything here."""
        found = read_all(store, ["verdict"])
        value = found[0] if found else b""
        self._committing = self._committing or value.startswith(_COMMIT)
        if value.startswith(_ERROR):
            self._end(decode_error(value.removeprefix(_ERROR).decode()))
        return value

    def _end(self, error: SpillError) -> None:
        if self._error is None:
            self._error = error
            self._line.fail(error)

    def _unknown(self) -> OutcomeUnknownError:
        error = OutcomeUnknownError(
            "Rank 0 was lost while it committed the checkpoint; it may be there or not",
            remedy="Look which checkpoint is the latest: it is whole",
        )
        error.ranks = (0,)
        return error
