"""Real faults for tests: full file systems, limits, file systems that fail on demand."""

from tests.faults.file_systems import small_file_system
from tests.faults.limits import another_user, file_size_limit

__all__ = ["another_user", "file_size_limit", "small_file_system"]
