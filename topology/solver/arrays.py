"""Types of the solver's arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Flags", "Integers"]

Integers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
#: Integers of whichever width a kernel is called with.
Array: TypeAlias = npt.NDArray[np.integer[Any]]
