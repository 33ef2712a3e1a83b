"""Ceilings from descriptions of machines."""

import pytest

from tensorspill.profiling.ceilings import Ceiling, device_ceilings, measured, per_cent, tightest
from tensorspill.topology.discovery.paths import Storage
from tensorspill.topology.machine import Bridge, Drive, Gpu, Machine


def machine(**rates):
    return Machine(
        bridges=(
            Bridge(name="host", kind="host"),
            Bridge(name="switch", parent="host", kind="switch", link_mbps=3000),
        ),
        drives=(
            Drive(name="nvme0n1", parent="host", link_mbps=7876, **rates),
            Drive(name="nvme1n1", parent="switch", link_mbps=7876, **rates),
            Drive(name="vda", kind="virtio"),
        ),
        gpus=(Gpu(bdf="0000:17:00.0", parent="switch", link_mbps=31504),),
    )


def below(*drives):
    return Storage(path="/x", kind="drive", device="d", drives=drives)


def test_a_drive_alone():
    link, own = device_ceilings(machine(), below("nvme0n1"), "read")
    assert link.name == "PCIe link of nvme0n1"
    # Four lanes of the fourth generation: 7.9 GB/s by width and speed, of which headers take some.
    assert link.gbps == pytest.approx(7.2, abs=0.1)
    assert own.gbps is None
    assert "not known" in own.why


def test_the_slowest_link_on_the_way_counts_and_those_of_an_array_add_up():
    (one, _), (both, _) = (
        device_ceilings(machine(), below(*names), "read")
        for names in (["nvme1n1"], ["nvme0n1", "nvme1n1"])
    )
    assert one.gbps == pytest.approx(3.0 * 256 / 280)
    assert both.gbps == pytest.approx((7.876 + 3.0) * 256 / 280)
    assert both.name == "PCIe link of nvme0n1 + nvme1n1"


def test_rates_of_the_drive_by_direction():
    rated = machine(read_mbps=6500, write_mbps=4000)
    assert device_ceilings(rated, below("nvme0n1"), "read")[1].gbps == 6.5
    assert device_ceilings(rated, below("nvme0n1", "nvme1n1"), "write")[1].gbps == 8.0


def test_what_is_not_known_says_why():
    (link, _) = device_ceilings(machine(), below("vda"), "read")
    assert link.gbps is None
    assert "not stated" in link.why
    memory = Storage(path="/x", kind="memory", unknown=(("device", "tmpfs is in memory"),))
    assert device_ceilings(machine(), memory, "read")[0].why == "tmpfs is in memory"


def test_a_gpu_has_a_link_of_its_own():
    found = device_ceilings(machine(), below("nvme0n1"), "read", machine().gpus[0])
    assert found[-1].name == "PCIe link of GPU 0000:17:00.0"
    assert found[-1].gbps == pytest.approx(3.0 * 256 / 280)


def test_the_tightest_of_those_that_are_known():
    unknown, wide, tight = Ceiling("a", None, ""), Ceiling("b", 8.0, ""), measured("c", 2.0, "")
    assert tightest([unknown, wide, tight]) is tight
    assert tightest([unknown]) is None
    assert per_cent(1.0, tight) == 50.0
    assert per_cent(1.0, None) is None
    assert per_cent(None, tight) is None
    assert measured("d", 0.0, "").gbps is None
