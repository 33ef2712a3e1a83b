"""GPUDirect Storage: bytes straight between drives and GPU memory, by kvikio and cuFile.

`GdsEngine` is the engine. `evidence.find` says whether GPUDirect Storage works between a folder and
a GPU, and why not: it tries, in a process of its own, since libcufile may wait for ever or crash.
Importing this loads neither kvikio nor a driver.
"""

from tensorspill.gds.engine import GdsEngine
from tensorspill.gds.evidence import Evidence
from tensorspill.gds.options import GdsOptions

__all__ = ["Evidence", "GdsEngine", "GdsOptions"]
