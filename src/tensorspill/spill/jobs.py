"""A put or get under way: what happens when its transfers have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tensorspill.pool.live import live_ranges
from tensorspill.spill.catalog import Catalog
from tensorspill.spill.digests import Digests, keep
from tensorspill.spill.plans import Plan

__all__ = ["Job", "Watcher"]


class Watcher(Protocol):
    """What code that builds on a spill file gives to `begin_put` and `begin_get`.

    Attributes
    ----------
    started : bool
        Set to True when the operation has been entered: from then on `ended` will be called,
        once, even if the call that began it raises.
    """

    started: bool

    def ended(self, error: BaseException | None) -> None:
        """Take notice of the end, before the transfer itself ends.

        Runs in an engine's thread or in the caller's, with no lock held. It must be quick, must
        not wait and must not raise.
        """
        ...


class Job:
    """Settles a plan, once.

    It holds the catalog and not the spill file, so that a spill file that nobody uses any more is
    collected even while transfers are under way.
    """

    def __init__(
        self,
        plan: Plan,
        write: bool,
        catalog: Catalog,
        digests: Digests | None,
        watcher: Watcher | None,
    ) -> None:
        self._plan = plan
        self._write = write
        self._catalog = catalog
        self._digests = digests
        self._watcher = watcher
        self._token: int | None = None
        if watcher is not None:
            watcher.started = True
        if digests is not None and not write:
            # The engine keeps the buffers until they are read, not until they are checked.
            self._token = keep(plan)

    @property
    def run(self) -> Callable[[Callable[[], None]], Any] | None:
        """Where `end` runs: digests of what was read take too long for an engine's thread."""
        return None if self._digests is None or self._write else self._digests.run

    def abandon(self, error: BaseException) -> None:
        """Settle a plan of which nothing was begun."""
        self._settle(error, begun=False)

    def end(self, error: BaseException | None) -> BaseException | None:
        """Settle a plan whose transfers have ended; return the error to report."""
        if error is None and self._digests is not None and not self._write:
            try:
                error = self._digests.compare(self._plan, self._catalog.path)
            except BaseException as failure:
                error = failure
        self._settle(error, begun=True)
        return error

    def _settle(self, error: BaseException | None, begun: bool) -> None:
        if self._token is not None:
            live_ranges.remove(self._token)
        if self._write:
            self._catalog.settle_put(self._plan, error, begun)
        else:
            self._catalog.settle_get(self._plan, error)
        watcher, self._watcher = self._watcher, None
        # Whoever holds the transfer holds this object, which must not hold the tensors.
        self._plan = Plan(())
        if watcher is not None:
            watcher.ended(error)
