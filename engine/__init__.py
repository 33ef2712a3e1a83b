"""The contract of every engine: requests in batches, futures of batches, statistics by path taken.

An engine moves bytes between memory and ranges of files, and never decides which. What all engines
have in common is here: `Engine` and `File`, which a subclass completes, the checks that lower
requests to a `Batch`, the `Transfer` that `Engine.submit` returns, and what `Engine.statistics`
reports.
"""

from tensorspill.engine.batch import Batch
from tensorspill.engine.engine import Engine
from tensorspill.engine.file import File
from tensorspill.engine.options import Resolved, resolve
from tensorspill.engine.request import Request
from tensorspill.engine.statistics import EngineStatistics, PathStatistics, TransferRecord
from tensorspill.engine.transfer import Transfer, gather

__all__ = [
    "Batch",
    "Engine",
    "EngineStatistics",
    "File",
    "PathStatistics",
    "Request",
    "Resolved",
    "Transfer",
    "TransferRecord",
    "gather",
    "resolve",
]
