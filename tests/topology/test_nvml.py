"""What NVML adds, with a stand-in for the binding's module that answers as a driver does."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tensorspill.topology import Mig, NvLink, discover
from tensorspill.topology.discovery.nvml import ask_driver, driver_is_there, with_nvml
from tensorspill.topology.machines import machine


class RefusedError(Exception):
    """As the binding raises for what a GPU does not support."""


class Driver:
    """Answers like ``cuda.bindings.nvml`` on a node of which some GPUs are shown.

    Handles are places in `shown`; those of slices are 100 times the place, plus the slice.
    """

    def __init__(
        self, shown: Sequence[str | None], *, refuse: tuple[str, ...] = (), migs: int = 0
    ) -> None:
        self.shown = shown
        self.refuse = refuse
        self.migs = migs

    def __getattribute__(self, name: str):
        if name.startswith("device_") and name in object.__getattribute__(self, "refuse"):

            def refusing(*arguments: object) -> None:
                raise RefusedError("Not Supported")

            return refusing
        return object.__getattribute__(self, name)

    def device_get_count_v2(self) -> int:
        return len(self.shown)

    def device_get_handle_by_index_v2(self, index: int) -> int:
        return index

    def device_get_pci_info_v3(self, handle: int) -> SimpleNamespace:
        # NVML's domain has eight digits, in upper case.
        return SimpleNamespace(bus_id=f"0000{self.shown[handle]}".upper())

    def device_get_name(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def device_get_uuid(self, handle: int) -> str:
        return f"MIG-{handle}" if handle >= 100 else f"GPU-{handle}"

    def device_get_memory_info_v2(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=(10 if handle >= 100 else 80) << 30)

    def device_get_numa_node_id(self, handle: int) -> int:
        return 2 + 8 * handle

    def device_get_cpu_affinity(self, handle: int, words: int) -> list[int]:
        return [0b1011, 1, *[0] * (words - 2)]

    def device_get_nvlink_state(self, handle: int, link: int) -> int:
        if link >= 12:
            raise RefusedError("Invalid Argument")
        return int(link < 6)

    def device_get_nvlink_remote_device_type(self, handle: int, link: int) -> int:
        return (0, 0, 2, 2, 2, 255)[link]

    def device_get_nvlink_remote_pci_info_v2(self, handle: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(bus_id=b"00000000:43:00.0\x00")

    def device_get_mig_mode(self, handle: int) -> tuple[int, int]:
        return (1, 1) if self.migs and handle == 0 else (0, 0)

    def device_get_max_mig_device_count(self, handle: int) -> int:
        return 7

    def device_get_mig_device_handle_by_index(self, handle: int, index: int) -> int:
        if index >= self.migs:
            raise RefusedError("Not Found")
        return 100 * (handle + 1) + index


GPUS = machine("dgx-h100").gpus


def test_gpus_are_joined_by_address_and_never_by_number():
    """A container shows the last two GPUs as 0 and 1."""
    notes: list[str] = []
    found = with_nvml(GPUS, Driver([GPUS[6].bdf, GPUS[7].bdf]), notes)
    assert [gpu.bdf for gpu in found] == [gpu.bdf for gpu in GPUS]
    assert [gpu.index for gpu in found] == [None] * 6 + [0, 1]
    assert found[0].why("index") == "NVML does not show this GPU to this process"
    assert (found[7].uuid, found[7].memory_node, found[7].memory_bytes) == ("GPU-1", 10, 80 << 30)
    assert found[7].cpus == GPUS[7].cpus
    assert notes == []


def test_nvlinks_are_counted_by_peer_and_hidden_switches_are_switches():
    found = with_nvml(GPUS, Driver([GPUS[0].bdf]), [])
    assert found[0].nvlinks == (
        NvLink(peer="0000:43:00.0", count=2),
        NvLink(peer="nvswitch", count=4),
    )


def test_slices():
    found = with_nvml(GPUS, Driver([GPUS[0].bdf], migs=2), [])
    assert found[0].migs == (
        Mig(index=0, uuid="MIG-100", memory_bytes=10 << 30),
        Mig(index=1, uuid="MIG-101", memory_bytes=10 << 30),
    )


def test_gpus_that_sysfs_lacks_are_there_with_the_reason():
    (found,) = with_nvml((), Driver(["0000:43:00.0"]), [])
    assert (found.bdf, found.index, found.parent) == ("0000:43:00.0", 0, None)
    assert found.why("parent") == found.why("numa_node") == "not in sysfs"
    assert found.cpus == (0, 1, 3, 64)


CALLS = [name for name in vars(Driver) if name.startswith("device_")]


@pytest.mark.parametrize("refused", CALLS)
def test_any_call_may_be_refused(refused):
    notes: list[str] = []
    found = with_nvml(GPUS, Driver([GPUS[0].bdf, "0000:99:00.0"], refuse=(refused,), migs=1), notes)
    assert {gpu.bdf for gpu in GPUS} <= {gpu.bdf for gpu in found} | {None}
    fields = {"device_get_uuid": "uuid", "device_get_memory_info_v2": "memory_bytes",
              "device_get_numa_node_id": "memory_node"}  # fmt: skip
    if refused in fields:
        assert found[0].why(fields[refused]) == "NVML: Not Supported" or getattr(
            found[0], fields[refused]
        )


def test_all_calls_may_be_refused():
    notes: list[str] = []
    found = with_nvml(GPUS, Driver([GPUS[0].bdf], refuse=tuple(CALLS)), notes)
    assert len(found) == len(GPUS)
    assert notes == ["NVML: refusing: Not Supported"]


@pytest.mark.skipif(driver_is_there(), reason="this node has a driver")
def test_without_a_driver_the_reason_is_a_note():
    notes: list[str] = []
    assert ask_driver(GPUS, notes) is GPUS
    assert notes[0].startswith("NVML was not asked: ")


@pytest.mark.gpu
def test_a_real_driver():
    found = discover()
    shown = [gpu for gpu in found.gpus if gpu.index is not None]
    assert shown
    assert all(gpu.uuid and gpu.uuid.startswith("GPU-") and gpu.memory_bytes for gpu in shown)
    assert not [note for note in found.notes if "NVML" in note]
