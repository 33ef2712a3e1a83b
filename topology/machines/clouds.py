"""Machines that clouds let, as their topology files for NCCL describe them."""

from __future__ import annotations

from tensorspill.topology.machine import Machine
from tensorspill.topology.machines.builder import Builder, link

__all__ = ["aws_p4d", "aws_p5", "azure_nd_a100_v4", "azure_nd_h100_v5", "gcp_a3"]


def azure_nd_a100_v4() -> Machine:
    """Azure ND A100 v4: 4 NUMA nodes with a switch of 2 GPUs and 2 NICs each."""
    b = Builder("azure-nd-a100-v4", link(4), ports=False)
    for node in range(4):
        b.node(node, f"{24 * node}-{24 * node + 23}", node // 2)
    # NUMA node and its switch, by the order of the GPUs' addresses.
    for node, gpus, nics in (
        (1, (0x1, 0x2), (0x101, 0x102)),
        (0, (0x3, 0x4), (0x103, 0x104)),
        (3, (0xB, 0xC), (0x105, 0x106)),
        (2, (0xD, 0xE), (0x107, 0x108)),
    ):
        switch = b.switch(b.host(f"cpu{node}", node), f"ffff:ff:{node + 1:02x}.0")
        for domain in gpus:
            b.gpu(switch, f"{domain:04x}:00:00.0", "NVIDIA A100-SXM4-40GB", memory_bytes=40 << 30)
        for nic in nics:
            name = f"mlx5_ib{nic - 0x101}"
            b.nic(switch, f"{nic:04x}:00:00.0", name, "infiniband", 200)
    for index in range(8):
        b.drive(None, f"{0x200 + index:04x}:00:00.0", 960, 3, numa_node=index // 2)
    b.raid("/mnt/nvme")
    b.note("The split of NUMA nodes over sockets, and the NICs' names, are made up")
    return b.build([("nvswitch", 12)])


def azure_nd_h100_v5() -> Machine:
    """Azure ND H100 v5: 2 NUMA nodes with 4 switches of a GPU and a NIC each."""
    b = Builder("azure-nd-h100-v5", link(5), ports=False)
    for node in range(2):
        b.node(node, f"{48 * node}-{48 * node + 47}", node)
    hosts = [b.host(f"cpu{node}", node) for node in range(2)]
    domains = (0x1, 0x2, 0x3, 0x8, 0x9, 0xA, 0xB, 0xC)
    for index, domain in enumerate(domains):
        switch = b.switch(hosts[index // 4], f"ffff:ff:{index + 1:02x}.0")
        b.gpu(switch, f"{domain:04x}:00:00.0", "NVIDIA H100 80GB HBM3", memory_bytes=80 << 30)
        b.nic(switch, f"{0x101 + index:04x}:00:00.0", f"mlx5_ib{index}", "infiniband", 400)
    for index in range(8):
        b.drive(None, f"{0x200 + index:04x}:00:00.0", 3840, 4, numa_node=index // 4)
    b.raid("/mnt/nvme")
    b.note("The NICs' names are made up")
    return b.build([("nvswitch", 18)])


def aws_p4d() -> Machine:
    """AWS p4d.24xlarge: 2 NUMA nodes with 2 switches of 2 GPUs and an EFA each."""
    b = Builder("aws-p4d", link(3), ports=False)
    b.node(0, "0-23,48-71", 0)
    b.node(1, "24-47,72-95", 1)
    hosts = [b.host(f"cpu{node}", node) for node in range(2)]
    for index, bus in enumerate((0x10, 0x20, 0x90, 0xA0)):
        switch = b.switch(hosts[index // 2], f"ffff:ff:{index + 1:02x}.0")
        for slot in ("1c", "1d"):
            b.gpu(switch, f"{bus:02x}:{slot}.0", "NVIDIA A100-SXM4-40GB", memory_bytes=40 << 30)
        b.nic(switch, f"{bus:02x}:1b.0", f"rdmap{bus}s27", "efa", 100)
        for number in range(2):
            b.drive(None, f"{bus:02x}:{0x1E + number:02x}.0", 1000, 3, numa_node=index // 2)
    b.raid("/mnt/nvme")
    return b.build([("nvswitch", 12)])


def aws_p5() -> Machine:
    """AWS p5.48xlarge: 2 NUMA nodes with 4 switches of a GPU and 4 EFAs each."""
    b = Builder("aws-p5", link(4), ports=False)
    b.node(0, "0-47,96-143", 0)
    b.node(1, "48-95,144-191", 1)
    hosts = [b.host(f"cpu{node}", node) for node in range(2)]
    for index, bus in enumerate((0x4F, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0)):
        switch = b.switch(hosts[index // 4], f"{index:02x}:00.0")
        b.gpu(switch, f"{bus:02x}:00.0", "NVIDIA H100 80GB HBM3", memory_bytes=80 << 30,
              link_mbps=link(5))  # fmt: skip
        for number in range(4):
            own = bus + 1 + number
            name = f"rdmap{bus + number}s0"
            b.nic(switch, f"{own:02x}:00.0", name, "efa", 100, link_mbps=link(4, 8))
        b.drive(None, f"{0xD0 + index:02x}:00.0", 3840, 4, numa_node=index // 4)
    b.raid("/mnt/nvme")
    b.note("The NICs' names are made up in part")
    return b.build([("nvswitch", 18)])


def gcp_a3() -> Machine:
    """GCP a3-highgpu-8g: 2 NUMA nodes with 2 switches of 2 GPUs and a data NIC each."""
    b = Builder("gcp-a3", link(5), ports=False)
    b.node(0, "0-51,104-155", 0)
    b.node(1, "52-103,156-207", 1)
    hosts = [b.host(f"cpu{node}", node) for node in range(2)]
    for index, bus in enumerate((0x04, 0x0A, 0x84, 0x8A)):
        switch = b.switch(hosts[index // 2], f"ffff:ff:{index + 1:02x}.0")
        for own in (bus, bus + 1):
            b.gpu(switch, f"{own:02x}:00.0", "NVIDIA H100 80GB HBM3", memory_bytes=80 << 30)
        b.nic(switch, f"{bus + 2:02x}:00.0", f"eth{index + 1}", "ethernet", 200,
              interfaces=(f"eth{index + 1}",))  # fmt: skip
        for slot in range(4):
            b.drive(None, f"{bus + 0x20:02x}:{slot:02x}.0", 375, 3, numa_node=index // 2)
    b.raid("/mnt/nvme")
    b.note("Of 4 or 8 data NICs this has 4; the NICs' addresses and names are made up")
    return b.build([("nvswitch", 18)])
