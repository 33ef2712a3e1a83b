"""DeepSpeed on this library's engines: its operator interface, its swapper, its writer factory.

`install` makes DeepSpeed use them in place of its own: no compiler and no libaio are needed, every
byte that was not moved raises, and any address, size and offset will do. DeepSpeed itself stays
optional: nothing here imports it until `install` is called.
"""

from tensorspill.deepspeed.handle import AioHandle, GdsHandle
from tensorspill.deepspeed.installation import SUPPORTED, install, uninstall
from tensorspill.deepspeed.param_swapper import AsyncPartitionedParameterSwapper
from tensorspill.deepspeed.status import PartitionedParamStatus
from tensorspill.deepspeed.writers import DataParallelWriterConfig, DataParallelWriterFactory

__all__ = [
    "SUPPORTED",
    "AioHandle",
    "AsyncPartitionedParameterSwapper",
    "DataParallelWriterConfig",
    "DataParallelWriterFactory",
    "GdsHandle",
    "PartitionedParamStatus",
    "install",
    "uninstall",
]
