"""Machines as NVIDIA builds them. What the functions do not note as made up is documented."""

from __future__ import annotations

from tensorspill.topology.machine import Machine
from tensorspill.topology.machines.builder import Builder, link

__all__ = ["dgx_2", "dgx_a100", "dgx_h100", "gb200", "gh200x4", "hgx_h100_vm"]

_BRIDGES = "Addresses of bridges are made up"


def dgx_2() -> Machine:
    """DGX-2: 16 V100, 2 sockets; 4 root ports with 2 switches of 2 GPUs, a NIC and a drive each."""
    b = Builder("dgx-2", link(3))
    b.note(f"{_BRIDGES}; so are those of NICs and drives, and the NICs' names")
    b.node(0, "0-23,48-71", 0, 768)
    b.node(1, "24-47,72-95", 1, 768)
    roots = (("34", "36", "39", "3b"), ("57", "59", "5c", "5e"),
             ("b7", "b9", "bc", "be"), ("e0", "e2", "e5", "e7"))  # fmt: skip
    for index, buses in enumerate(roots):
        top = b.switch(b.host(f"pci0000:{0x20 + 0x40 * index:02x}", index // 2))
        for pair in range(2):
            below, number = b.switch(top), 2 * index + pair
            for bus in buses[2 * pair : 2 * pair + 2]:
                b.gpu(below, f"{bus}:00.0", "Tesla V100-SXM3-32GB", memory_bytes=32 << 30)
            nic = f"{int(buses[2 * pair], 16) - 2:02x}:00.0"
            b.nic(below, nic, f"mlx5_{number}", "infiniband", 100)
            b.drive(below, f"{int(buses[2 * pair], 16) - 1:02x}:00.0", 3840, 3)
    b.raid("/raid")
    return b.build([("nvswitch", 6)])


def dgx_a100() -> Machine:
    """DGX A100: 8 A100, 8 NUMA nodes of which 4 have devices: 2 GPUs, 2 NICs, 2 drives each."""
    b = Builder("dgx-a100", link(4))
    b.note(f"{_BRIDGES}; so are those of drives")
    for node in range(8):
        first = 16 * node
        b.node(node, f"{first}-{first + 15},{first + 128}-{first + 143}", node // 4, 128)
    # NUMA node, its host bridge, and the buses of 2 GPUs and 2 NICs.
    pairs = ((3, "00", "07", "0f", "0c", "12"), (1, "40", "47", "4e", "4b", "54"),
             (7, "80", "87", "90", "8d", "94"), (5, "b0", "b7", "bd", "ba", "cc"))  # fmt: skip
    for index, (node, host, *buses) in enumerate(pairs):
        top = b.switch(b.host(f"pci0000:{host}", node))
        gpus, nics = b.switch(top), b.switch(top)
        for bus in buses[:2]:
            b.gpu(gpus, f"{bus}:00.0", "NVIDIA A100-SXM4-80GB", memory_bytes=80 << 30)
        for number, bus in enumerate(buses[2:], 2 * index):
            b.nic(nics, f"{bus}:00.0", f"mlx5_{number}", "infiniband", 200)
        for slot in range(2):
            b.drive(nics, f"{int(host, 16) + 0x18 + slot:02x}:00.0", 3840, 4)
    b.raid("/raid")
    return b.build([("nvswitch", 12)])


def dgx_h100() -> Machine:
    """DGX H100: 8 H100 on 2 sockets, each with a NIC (and a drive) of its own below one switch."""
    b = Builder("dgx-h100", link(5))
    b.note(f"{_BRIDGES}; so are those of drives")
    b.node(0, "0-55,112-167", 0, 1024)
    b.node(1, "56-111,168-223", 1, 1024)
    rails = (("1b", "18", 0), ("43", "40", 3), ("52", "4f", 4), ("61", "5e", 5),
             ("9d", "9a", 6), ("c3", "c0", 9), ("d1", "ce", 10), ("df", "dc", 11))  # fmt: skip
    for index, (gpu, nic, number) in enumerate(rails):
        top = b.switch(b.host(f"pci0000:{int(nic, 16) - 3:02x}", index // 4))
        below = b.switch(top)
        b.gpu(below, f"{gpu}:00.0", "NVIDIA H100 80GB HBM3", memory_bytes=80 << 30)
        b.nic(top, f"{nic}:00.0", f"mlx5_{number}", "infiniband", 400)
        b.drive(top, f"{int(nic, 16) + 1:02x}:00.0", 3840, 4)
    b.raid("/raid")
    return b.build([("nvswitch", 18)])


def hgx_h100_vm() -> Machine:
    """Virtual machine of a cloud with 8 H100: GPU i is by mlx5_(7-i), links unknown."""
    b = Builder("hgx-h100-vm", None, ports=False)
    b.note("All addresses but that of GPU 0 are made up, and so is the split over 2 NUMA nodes")
    b.node(0, "0-103", 0)
    b.node(1, "104-207", 1)
    hosts = [b.host(f"cpu{node}", node) for node in range(2)]
    for index in range(8):
        switch = b.switch(hosts[index // 4], f"ffff:ff:{index + 1:02x}.0")
        b.gpu(switch, f"{0xA4 + 8 * index:02x}:00.0", "NVIDIA H100 80GB HBM3")
        b.nic(switch, f"{0xA4 + 8 * index + 1:02x}:00.0", f"mlx5_{7 - index}", "infiniband", 400)
    for index in range(4):
        node = index // 2
        b.drive(None, f"{0xE8 + index:02x}:00.0", 3840, 4, numa_node=node)
    b.raid("/mnt/nvme")
    return b.build([("nvswitch", 18)])


def gb200() -> Machine:
    """Tray of GB200: 2 Grace with 2 Blackwell each, whose memory is 4 nodes without CPUs."""
    b = Builder("gb200", None)
    b.note(f"{_BRIDGES}; so are those of NICs and drives")
    for socket in range(2):
        b.node(socket, f"{72 * socket}-{72 * socket + 71}", socket, 480)
    for node in (2, 10, 18, 26):
        b.node(node, "", None, 186)
    for index, domain in enumerate((0x8, 0x9, 0x18, 0x19)):
        port = b.host(f"pci{domain:04x}:00", index // 2)
        memory = 2 + 8 * index
        b.gpu(port, f"{domain:04x}:01:00.0", "NVIDIA GB200", memory_node=memory,
              memory_bytes=186 << 30)  # fmt: skip
        nic = b.host(f"pci{domain - 8:04x}:00", index // 2)
        b.nic(nic, f"{domain - 8:04x}:03:00.0", f"mlx5_{index}", "infiniband", 400,
              link_mbps=link(5))  # fmt: skip
        for slot in range(2):
            number = 0x10 * (index // 2) + 4 + 2 * (index % 2) + slot
            b.drive(b.host(f"pci{number:04x}:00", index // 2), f"{number:04x}:01:00.0", 3840, 5)
    b.raid("/raid")
    return b.build([("nvswitch", 18)])


def gh200x4() -> Machine:
    """4 GH200 in one node: 4 sockets and 32 nodes without CPUs, 8 for each GPU."""
    b = Builder("gh200x4", None)
    b.note(f"{_BRIDGES}; so are NICs and drives")
    for socket in range(4):
        b.node(socket, f"{72 * socket}-{72 * socket + 71}", socket, 120)
    for node in range(4, 36):
        b.node(node, "", None, 96 if node % 8 == 4 else 0)
    for index in range(4):
        domain = 0x10 * index
        b.gpu(b.host(f"pci{domain + 9:04x}:00", index), f"{domain + 9:04x}:01:00.0",
              "NVIDIA GH200 120GB", memory_node=4 + 8 * index, memory_bytes=96 << 30)  # fmt: skip
        b.nic(b.host(f"pci{domain:04x}:00", index), f"{domain:04x}:01:00.0", f"mlx5_{index}",
              "infiniband", 200, link_mbps=link(5))  # fmt: skip
        b.drive(b.host(f"pci{domain + 4:04x}:00", index), f"{domain + 4:04x}:01:00.0", 3840, 4)
    b.raid("/raid")
    return b.build([("each", 6)])
