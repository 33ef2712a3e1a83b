"""Options of the engine for CUDA tensors on the host path."""

from __future__ import annotations

from dataclasses import dataclass

from tensorspill.errors import UnsupportedError
from tensorspill.host_fallback.options import PAGE, AioOptions

__all__ = ["StagedOptions"]

#: The least number of blocks: one is filled while the other is emptied.
LEAST_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class StagedOptions(AioOptions):
    """How CUDA tensors are staged; the rest is how the AIO engine cuts and queues.

    Attributes
    ----------
    staging_bytes : int
        Page-locked host memory for all transfers of the engine, taken at the first one.
    staging_block : int
        Bytes of one step between GPU and host; a multiple of 4096. `staging_bytes` holds at least
        two of them.
    """

    staging_bytes: int = 64 << 20
    staging_block: int = 4 << 20

    def __post_init__(self) -> None:
        AioOptions.__post_init__(self)
        if self.staging_block < PAGE or self.staging_block % PAGE:
            raise UnsupportedError(
                f"staging_block must be a multiple of {PAGE}, not {self.staging_block}"
            )
        if self.staging_bytes < LEAST_BLOCKS * self.staging_block:
            raise UnsupportedError(
                f"staging_bytes must hold {LEAST_BLOCKS} blocks of {self.staging_block} bytes, "
                f"not {self.staging_bytes}"
            )
