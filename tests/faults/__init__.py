"""Real faults for tests: full file systems, limits, file systems that fail on demand."""

from tests.faults.checks import descriptors, round_trip, usable
from tests.faults.child import ChildError, in_child, start_child
from tests.faults.file_systems import small_file_system
from tests.faults.fuse import FaultyFileSystem, faulty_file_system
from tests.faults.limits import (
    address_space,
    another_user,
    file_size_limit,
    kernel_setting,
    resource_limit,
)
from tests.faults.seccomp import refuse_system_call, without_huge_pages
from tests.faulty_drive.rules import Rule

__all__ = [
    "ChildError",
    "FaultyFileSystem",
    "Rule",
    "address_space",
    "another_user",
    "descriptors",
    "faulty_file_system",
    "file_size_limit",
    "in_child",
    "kernel_setting",
    "refuse_system_call",
    "resource_limit",
    "round_trip",
    "small_file_system",
    "start_child",
    "usable",
    "without_huge_pages",
]
