"""Machines that break what programs take for granted."""

from __future__ import annotations

from tensorspill.topology.machine import Machine
from tensorspill.topology.machines.builder import Builder, link

__all__ = ["adversarial", "plain"]


def adversarial() -> Machine:
    """5 GPUs: 3 on NUMA node 0, 1 on node 1, the next on node 2; all of it is made up."""
    b = Builder("adversarial", link(4))
    b.note("The whole machine is made up")
    for node in range(3):
        b.node(node, f"{8 * node}-{8 * node + 7}", node, 64)
    hosts = [b.host(f"pci0000:{0x10 + 0x40 * node:02x}", node) for node in range(3)]
    tops = [b.switch(host) for host in hosts]
    for index, node in enumerate((0, 0, 0, 1, 2)):
        b.gpu(tops[node], f"{0x18 + 0x40 * node + index:02x}:00.0", "NVIDIA A100-PCIE-40GB")
    b.nic(tops[1], "60:00.0", "mlx5_0", "roce", 100, interfaces=("eth0",))
    b.drive(hosts[2], "a8:00.0", 1920, 4)
    return b.build()


def plain() -> Machine:
    """Workstation: one GPU, one drive and one NIC, each on a root port; all of it is made up."""
    b = Builder("plain", link(4))
    b.note("The whole machine is made up")
    b.node(0, "0-15", 0, 64)
    host = b.host("pci0000:00", 0)
    b.gpu(host, "01:00.0", "NVIDIA RTX 6000 Ada Generation")
    b.nic(host, "02:00.0", "eth0", "ethernet", 10, interfaces=("eth0",))
    b.drive(host, "03:00.0", 2000, 4)
    return b.build()
