"""The host path: Linux AIO with O_DIRECT where it is possible, buffered threads where it isn't.

Open its engine with ``tensorspill.open_engine(folder, backend="aio")``. The modules with compiled
kernels are imported when an engine is opened, not here.
"""

from tensorspill.host_fallback.options import AioOptions

__all__ = ["AioOptions"]
