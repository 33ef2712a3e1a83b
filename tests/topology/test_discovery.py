"""Discovery finds what a tree holds, and never raises."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorspill.topology import Machine, discover
from tensorspill.topology.machines import machine, names
from tensorspill.topology.machines.sysfs_tree import write_sysfs
from tests.thorough import examples
from tests.topology.trees import facts, is_virtual, machines, seen

KINDS = ("nodes", "bridges", "gpus", "nics", "drives", "stacks", "mounts")
PHYSICAL = [name for name in names() if not is_virtual(machine(name))]
VIRTUAL = [name for name in names() if is_virtual(machine(name))]


@pytest.mark.parametrize("name", PHYSICAL)
def test_known_machines_are_found_in_sysfs(name, tmp_path):
    original = machine(name)
    found = seen(original, tmp_path)
    assert facts(found, *KINDS) == facts(original, *KINDS)
    assert found.hostname == name
    assert found.notes == ()


@pytest.mark.parametrize("name", VIRTUAL)
def test_virtual_machines_are_found_in_sysfs_and_a_topology_file(name, tmp_path):
    original = machine(name)
    found = seen(original, tmp_path)
    assert facts(found, "gpus", "nodes", "stacks") == facts(original, "gpus", "nodes", "stacks")
    assert facts(found, "nics") == facts(original, "nics")
    assert [gpu.nvlinks for gpu in found.gpus] == [gpu.nvlinks for gpu in original.gpus]
    # No source says where the drives are, so nor does discovery.
    assert {drive.numa_node for drive in found.drives} == {None}
    assert all("says -1" in drive.why("numa_node") for drive in found.drives)


@settings(max_examples=examples(25))
@given(machines())
def test_any_machine_is_found_in_sysfs(tmp_path_factory, original):
    root = tmp_path_factory.mktemp("sysfs")
    found = seen(original, root)
    assert facts(found, *KINDS[2:]) == facts(original, *KINDS[2:])
    above = {d.bdf: [b.name for b in original.ancestors(d)] for d in original.drives}
    assert above == {d.bdf: [b.name for b in found.ancestors(d)] for d in found.drives}
    shutil.rmtree(root)


def test_this_machine_is_found():
    found = discover(nvml=False)
    assert found.hostname == socket.gethostname()
    assert {cpu for node in found.nodes for cpu in node.cpus} >= os.sched_getaffinity(0)
    assert any(mount.path == "/" for mount in found.mounts)
    assert not [note for note in found.notes if "not read" in note]
    assert Machine.parse(found.dump()) == found


def test_discovery_of_this_machine_is_quick():
    """Stated as 50 ms; the fastest of some, since others may use the processors meanwhile."""

    def took() -> float:
        start = time.perf_counter()
        discover(nvml=False)
        return time.perf_counter() - start

    assert min(took() for _ in range(10)) < 0.05


def test_nothing_is_imported_for_a_driver_that_is_not_there():
    code = (
        "import os, sys\n"
        "there = any(map(os.path.exists, ['/proc/driver/nvidia/version', '/dev/nvidiactl']))\n"
        "from tensorspill.topology import discover\n"
        "discover()\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert there or not loaded & {'cuda', 'torch', 'numba', 'rich', 'matplotlib'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_an_empty_root_is_a_machine_of_which_nothing_is_known(tmp_path):
    found = discover(str(tmp_path))
    assert found.devices == ()
    assert found.nodes[0].why("memory_bytes")
    assert discover(str(tmp_path / "missing")).nodes


def entries(root: Path) -> list[Path]:
    """Return all files, folders and links of a tree, sorted."""
    found = []
    for folder, folders, files in os.walk(root):
        found += [Path(folder) / name for name in (*folders, *files)]
    return sorted(found)


GARBAGE = st.sampled_from(
    [b"", b"\x00", b"\xff\xfe\x80", b"-1", b"0x", b"0-", b"9" * 400, b"0-99999999",
     b"-9223372036854775809", b"0,,1", b"nan", b"\n" * 9, b"1e9", b"4294967295", b"65535", b" - ",
     b"<", b"a" * 70000]
) | st.binary(max_size=40)  # fmt: skip

DAMAGES = st.lists(
    st.tuples(
        st.integers(0, 5000),
        st.sampled_from(["delete", "garble", "truncate", "folder", "loop", "unreadable", "away"]),
        GARBAGE,
    ),
    min_size=1,
    max_size=12,
)


class Damaged:
    """A tree whose entries are damaged in place, and put back afterwards."""

    def __init__(self, root: Path, aside: Path) -> None:
        self.root = root.resolve()
        self._aside = aside
        self._entries = entries(self.root)
        self._moved: list[tuple[Path, Path]] = []

    def damage(self, where: int, how: str, content: bytes) -> None:
        """Damage an entry; a folder is deleted, or becomes what a file may become."""
        path = self._entries[where % len(self._entries)]
        # Never through a link that was put there before: it may lead out of the tree.
        if os.path.realpath(path.parent) != str(path.parent) or not os.path.lexists(path):
            return
        kept = self._aside / str(len(self._moved))
        path.rename(kept)
        self._moved.append((path, kept))
        if how == "garble":
            path.write_bytes(content)
        elif how == "truncate":
            path.write_bytes(b"" if kept.is_symlink() or kept.is_dir() else kept.read_bytes()[:2])
        elif how == "folder":
            path.mkdir()
        elif how == "loop":
            path.symlink_to(path.name)
        elif how == "unreadable":
            path.symlink_to("/proc/self/mem")
        elif how == "away":
            path.symlink_to(os.fsdecode(b"/" + content[:200].replace(b"\0", b"")))

    def restore(self) -> None:
        for path, kept in reversed(self._moved):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif os.path.lexists(path):
                path.unlink()
            kept.rename(path)
        self._moved.clear()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> dict[str, Damaged]:
    """Trees with ports, with many nodes, a small one, and a virtual machine's."""
    found = {}
    for name in ("adversarial", "gb200", "aws-p4d", "plain"):
        root = tmp_path_factory.mktemp(name)
        seen(machine(name), root)
        found[name] = Damaged(root, tmp_path_factory.mktemp("aside"))
    return found


@settings(max_examples=examples(200))
@given(name=st.sampled_from(["adversarial", "gb200", "aws-p4d", "plain"]), damages=DAMAGES)
def test_a_damaged_tree_never_raises(damaged, name, damages):
    tree = damaged[name]
    try:
        for how in damages:
            tree.damage(*how)
        found = discover(str(tree.root), topology_file=str(tree.root / "topology.xml"))
    finally:
        tree.restore()
    # Not even to the guard round each reader, which is there for what nobody thought of.
    assert not [note for note in found.notes if "not read:" in note]
    assert Machine.parse(found.dump()) == found
    for gpu in found.gpus:
        assert gpu.bdf is not None or gpu.why("bdf")


def test_each_file_of_a_tree_may_be_missing(tmp_path):
    """Every single file and link, one at a time."""
    root = tmp_path / "tree"
    write_sysfs(machine("plain"), str(root))
    for path in entries(root):
        if path.is_dir() and not path.is_symlink():
            continue
        aside = tmp_path / "aside"
        path.rename(aside)
        found = discover(str(root))
        assert not [note for note in found.notes if "not read:" in note], path
        aside.rename(path)


def test_memory_only_nodes_are_told_apart(tmp_path):
    found = seen(machine("gb200"), tmp_path)
    assert [node.index for node in found.nodes if node.memory_only] == [2, 10, 18, 26]
    assert [socket.cpus for socket in found.sockets] == [tuple(range(72)), tuple(range(72, 144))]
    assert found.nodes[2].why("socket") == "it has no CPUs"


def test_numa_node_minus_one_is_unknown_and_never_zero(tmp_path):
    write_sysfs(machine("plain"), str(tmp_path), flat=True)
    (gpu,) = discover(str(tmp_path)).gpus
    assert gpu.numa_node is None
    assert gpu.why("numa_node").endswith("numa_node says -1")


def test_link_widths_of_virtual_machines_are_unknown(tmp_path):
    write_sysfs(machine("plain"), str(tmp_path))
    (width,) = tmp_path.glob("sys/devices/pci0000:00/0000:01:00.0/current_link_width")
    for value in ("0", "255", "63"):
        width.write_text(value)
        (gpu,) = discover(str(tmp_path)).gpus
        assert gpu.link_mbps is None
        assert value in gpu.why("link_mbps")


def test_multipath_namespaces_have_the_place_of_a_live_controller(tmp_path):
    """The namespace lies in its subsystem, which is no PCI device, beside links to controllers."""
    write_sysfs(machine("plain"), str(tmp_path))
    sys_ = tmp_path / "sys"
    controller = next(sys_.glob("devices/pci0000:00/0000:03:00.0/nvme/nvme0"))
    subsystem = sys_ / "devices/virtual/nvme-subsystem/nvme-subsys0"
    subsystem.mkdir(parents=True)
    (controller / "nvme0n1").rename(subsystem / "nvme0n1")
    for link in ("block", "class/block"):
        (sys_ / link / "nvme0n1").unlink()
        depth = "../" * (link.count("/") + 1)
        target = f"{depth}devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1"
        (sys_ / link / "nvme0n1").symlink_to(target)
    (subsystem / "nvme0").symlink_to(os.path.relpath(controller, subsystem))
    (sys_ / "block/nvme0c0n1").symlink_to("../class/nvme/nvme0")
    (drive,) = discover(str(tmp_path)).drives
    assert (drive.name, drive.controller, drive.bdf) == ("nvme0n1", "nvme0", "0000:03:00.0")


def test_drives_over_a_network_have_no_place(tmp_path):
    write_sysfs(machine("plain"), str(tmp_path))
    next(tmp_path.glob("sys/devices/pci0000:00/0000:03:00.0/nvme/nvme0/transport")).write_text(
        "tcp"
    )
    (drive,) = discover(str(tmp_path)).drives
    assert (drive.transport, drive.bdf, drive.numa_node) == ("tcp", None, None)
    assert drive.why("bdf") == "it is reached over tcp"


def test_intel_vmd_is_a_bridge_below_a_device(tmp_path):
    """Its domain has a host bridge of its own, below a device of domain 0."""
    write_sysfs(machine("plain"), str(tmp_path))
    vmd = tmp_path / "sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"
    (vmd / "nvme/nvme7/nvme7n1").mkdir(parents=True)
    (tmp_path / "sys/block/nvme7n1").symlink_to(
        os.path.relpath(vmd / "nvme/nvme7/nvme7n1", tmp_path / "sys/block")
    )
    found = discover(str(tmp_path))
    drive = found.drive("nvme7n1")
    assert drive.bdf == "10000:e1:00.0"
    above = [(bridge.name, bridge.kind) for bridge in found.ancestors(drive)]
    assert above == [
        ("10000:e0:06.0", "bridge"),
        ("pci10000:e0", "bridge"),
        ("0000:00:0e.0", "root-port"),
        ("pci0000:00", "host"),
    ]


def test_the_drivers_folder_gives_uuid_and_model(tmp_path):
    write_sysfs(machine("plain"), str(tmp_path))
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    text = "Model: \t\t NVIDIA L4\nIRQ: 7\nGPU UUID: \t GPU-0a1b2c3d-0000-1111-2222-333344445555\n"
    (folder / "information").write_text(text)
    (gpu,) = discover(str(tmp_path)).gpus
    assert (gpu.name, gpu.uuid) == ("NVIDIA L4", "GPU-0a1b2c3d-0000-1111-2222-333344445555")


def test_gpus_whose_device_file_is_not_in_the_container_have_no_number(tmp_path):
    """Sysfs shows all GPUs in any container; CUDA numbers those that it can open."""
    original = machine("dgx-h100")
    write_sysfs(original, str(tmp_path))
    (tmp_path / "dev").mkdir()
    for minor, gpu in enumerate(original.gpus):
        folder = tmp_path / "proc/driver/nvidia/gpus" / str(gpu.bdf)
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t x\nDevice Minor: \t {minor}\n")
    assert [gpu.index for gpu in discover(str(tmp_path)).gpus] == list(range(8))
    for name in ("nvidiactl", "nvidia2", "nvidia6"):
        (tmp_path / "dev" / name).touch()
    found = discover(str(tmp_path)).gpus
    assert [gpu.index for gpu in found] == [None, None, 0, None, None, None, 1, None]
    assert found[0].why("index") == "/dev/nvidia0 is not in this container"


def test_a_broken_topology_file_is_a_note(tmp_path):
    write_sysfs(machine("plain"), str(tmp_path))
    (tmp_path / "broken.xml").write_text("<system><cpu")
    found = discover(str(tmp_path), environ={"NCCL_TOPO_FILE": str(tmp_path / "broken.xml")})
    assert "broken.xml" in found.notes[-1]
    assert len(found.gpus) == 1
    found = discover(str(tmp_path), environ={"NCCL_TOPO_FILE": "/missing"})
    assert "/missing" in found.notes[-1]


def test_virtual_topology_is_found_in_its_usual_place(tmp_path):
    seen(machine("hgx-h100-vm"), tmp_path)
    folder = tmp_path / "var/run/nvidia-topologyd"
    folder.mkdir(parents=True)
    (tmp_path / "topology.xml").rename(folder / "virtualTopology.xml")
    found = discover(str(tmp_path), environ={})
    assert found.switch_of(found.gpus[0]) == found.switch_of(found.nic("mlx5_7"))
