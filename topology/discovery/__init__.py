"""Finding out what a machine consists of: from the kernel, the driver, and topology files."""

from tensorspill.topology.discovery.finding import discover
from tensorspill.topology.discovery.paths import Storage, device_of, storage_of
from tensorspill.topology.discovery.xml_hwloc import read_hwloc_xml
from tensorspill.topology.discovery.xml_nccl import read_nccl_xml

__all__ = [
    "Storage",
    "device_of",
    "discover",
    "read_hwloc_xml",
    "read_nccl_xml",
    "storage_of",
]
