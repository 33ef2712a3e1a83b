"""From a path to the drives below it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tensorspill.errors import UnsupportedError
from tensorspill.topology import discover
from tensorspill.topology.discovery.mounts import is_shared
from tensorspill.topology.discovery.paths import device_of, storage_of
from tensorspill.topology.machines import machine
from tensorspill.topology.machines.builder import Builder, link
from tensorspill.topology.machines.sysfs_tree import write_sysfs


def table(root: Path, *lines: str) -> None:
    """Write a table of mounts, numbered from 20; a line is device, path, type, source, options."""
    rows = []
    for number, line in enumerate(lines, 20):
        device, path, kind, source, options = (*line.split(" "), "rw")[:5]
        rows.append(
            f"{number} 1 {device} / {path} rw,relatime shared:1 - {kind} {source} {options}"
        )
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/mountinfo").write_text("\n".join(rows) + "\n")


def stack(root: Path, name: str, number: str, members: list[str], **files: str) -> None:
    """Add a block device made of others."""
    folder = root / "sys/devices/virtual/block" / name
    (folder / "slaves").mkdir(parents=True)
    for member in members:
        (folder / "slaves" / member).symlink_to(f"../../../../../class/block/{member}")
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    for entry in (f"sys/block/{name}", f"sys/class/block/{name}", f"sys/dev/block/{number}"):
        link = root / entry
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(folder, link.parent))


def partition(root: Path, disk: str, name: str, number: str) -> None:
    """Add a partition to a disk."""
    folder = (root / "sys/class/block" / disk).resolve() / name
    folder.mkdir()
    (folder / "partition").write_text("1\n")
    for entry in (f"sys/class/block/{name}", f"sys/dev/block/{number}"):
        path = root / entry
        path.symlink_to(os.path.relpath(folder, path.parent))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    builder = Builder("drives", link(4))
    builder.node(0, "0", 0)
    host = builder.host("pci0000:00", 0)
    for number in range(12):
        builder.drive(host, f"{number + 1:02x}:00.0", 1000, 4)
    write_sysfs(builder.build(), str(tmp_path))
    return tmp_path


def test_partitions_arrays_and_volumes_are_followed_to_their_drives(root):
    partition(root, "nvme0n1", "nvme0n1p1", "259:100")
    partition(root, "nvme1n1", "nvme1n1p1", "259:101")
    stack(root, "md1", "9:1", ["nvme0n1p1", "nvme1n1p1"], **{"md/level": "raid1"})
    stack(
        root, "dm-0", "252:0", ["md1", "nvme10n1"], **{"dm/uuid": "LVM-abc", "dm/name": "vg-data"}
    )
    table(root, "259:100 /boot ext4 /dev/x", "9:1 /one xfs /dev/md1", "252:0 /two xfs /dev/dm-0")
    boot = device_of("/boot/grub", str(root))
    assert (boot.kind, boot.device, boot.partition, boot.drives) == (
        "drive", "nvme0n1", "nvme0n1p1", ("nvme0n1",),
    )  # fmt: skip
    assert device_of("/one/x", str(root)).drives == ("nvme0n1", "nvme1n1")
    two = device_of("/two", str(root))
    assert (two.kind, two.device) == ("stack", "dm-0")
    assert two.drives == ("nvme0n1", "nvme1n1", "nvme10n1")
    found = {item.name: item for item in discover(str(root)).stacks}
    assert found["dm-0"].kind == "lvm"
    assert found["dm-0"].label == "vg-data"
    assert found["dm-0"].members == ("md1", "nvme10n1")
    assert found["md1"].drives == ("nvme0n1", "nvme1n1")


@pytest.mark.parametrize("loop", [["md5"], ["md6"], ["nvme0n1", "md6"]])
def test_a_stack_made_of_itself_is_a_typed_error_that_names_the_file(root, loop):
    stack(root, "md5", "9:5", loop, **{"md/level": "raid0"})
    stack(root, "md6", "9:6", ["md5"], **{"md/level": "raid0"})
    table(root, "9:6 /data xfs /dev/md6")
    with pytest.raises(UnsupportedError, match=r"is made of itself: .*md5") as caught:
        device_of("/data", str(root))
    assert caught.value.path is not None
    assert caught.value.path.startswith(str(root))
    assert caught.value.path.endswith("/slaves")
    # Discovery goes on without it.
    found = discover(str(root))
    assert len(found.drives) == 12
    assert any("made of itself" in note for note in found.notes)


def test_the_longest_mount_counts_and_of_those_the_youngest(root):
    table(root, "259:0 / ext4 a", "259:1 /mnt ext4 b", "259:2 /mnt ext4 c", "259:3 /mnt2 ext4 d")
    held = {p: device_of(p, str(root)).device for p in ("/", "/mnt", "/mnt/x", "/mnt2", "/mn")}
    assert held == {"/": "nvme0n1", "/mnt": "nvme2n1", "/mnt/x": "nvme2n1", "/mnt2": "nvme3n1",
                    "/mn": "nvme0n1"}  # fmt: skip


def test_spaces_in_paths(root):
    table(root, "259:4 /my\\040data ext4 /dev/x")
    assert device_of("/my data/file", str(root)).device == "nvme4n1"


def test_btrfs_has_an_anonymous_number_but_names_its_device(root):
    table(root, "0:55 /data btrfs /dev/nvme3n1")
    assert device_of("/data", str(root)).device == "nvme3n1"


def test_overlays_are_followed_to_their_upper_folder(root):
    (root / "up/per").mkdir(parents=True)
    line = "0:40 /merged overlay overlay rw,lowerdir=/low,upperdir=/up/per,workdir=/w"
    table(root, "259:0 / ext4 a", "259:1 /up ext4 b", line)
    found = device_of("/merged/x", str(root))
    assert (found.device, found.mount, found.filesystem) == ("nvme1n1", "/merged", "overlay")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("rw,lowerdir=l,upperdir=up/per,workdir=w", "'up/per' is relative"),
        ("rw,lowerdir=/l,upperdir=/missing,workdir=/w", "/missing can't be seen"),
        ("rw", "name no folder"),
        ("rw,upperdir=/merged/self", "can't be seen"),
    ],
)
def test_overlays_that_cant_be_followed_say_why(root, options, why):
    (root / "merged/self").mkdir(parents=True)
    table(root, "259:0 / ext4 a", f"0:40 /merged overlay overlay {options}")
    found = device_of("/merged", str(root))
    assert found.device is None
    assert why in found.why("device")


def test_overlays_on_each_other_come_to_an_end(root):
    for name in ("a", "b"):
        (root / name).mkdir()
    table(root, "0:40 /a overlay overlay upperdir=/b", "0:41 /b overlay overlay upperdir=/a")
    assert "lie on each other" in device_of("/a", str(root)).why("device")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("tmpfs", "memory"), ("nfs4", "network"), ("lustre", "network"), ("fuse.s3fs", "network"),
     ("virtiofs", "network"), ("zfs", "unknown"), ("fuse.fuse-overlayfs", "unknown")],
)  # fmt: skip
def test_file_systems_without_a_block_device_say_so(root, kind, expected):
    table(root, f"0:77 /place {kind} server:/export")
    found = device_of("/place/file", str(root))
    assert (found.kind, found.device, found.drives) == (expected, None, ())
    assert kind in found.why("device") or "overlay" in found.why("device")


def test_no_mount_at_all(root):
    (root / "proc/self/mountinfo").unlink()
    assert "No mount" in device_of("/x", str(root)).why("device")


def test_an_image_is_followed_to_where_it_lies(root):
    stack(root, "loop0", "7:0", [], **{"loop/backing_file": "/images/disk.img"})
    table(root, "259:5 /images xfs a", "7:0 /mnt ext4 /dev/loop0")
    found = device_of("/mnt/x", str(root))
    assert (found.device, found.filesystem, found.mount) == ("nvme5n1", "ext4", "/mnt")


def test_network_file_systems_are_told_from_local_fuse():
    assert is_shared("nfs")
    assert is_shared("fuse.gcsfuse")
    assert not is_shared("fuseblk")
    assert not is_shared("ext4")


def test_this_machines_paths():
    for path in ("/", "/proc/self", "/dev/shm", "/no/such/folder", __file__):
        found = device_of(path)
        assert found.mount
        assert found.device is not None or found.why("device")
    assert device_of("/no/such/folder").path == "/"
    with pytest.raises(UnsupportedError, match="null character"):
        device_of("/proc/self/\0")


def test_machines_without_a_tree():
    original = machine("dgx-h100")
    found = storage_of(original, "/raid/checkpoints")
    assert (found.kind, found.device) == ("stack", "md0")
    assert found.drives == original.stacks[0].drives
    assert "No mount" in storage_of(original, "/raids").why("device")


def mounted(tmp_path: Path, script: str, *paths: str) -> list[dict[str, str]]:
    """Run a script of mounts in a namespace of its own, and return what holds some paths there."""
    code = (
        "import json, sys\n"
        "from tensorspill.topology.discovery.paths import device_of\n"
        "print(json.dumps([device_of(path).to_json() for path in sys.argv[1:]]))\n"
    )
    (tmp_path / "ask.py").write_text(code)
    whole = f"set -e; cd {tmp_path}; {script}; exec {sys.executable} ask.py {' '.join(paths)}"
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare(1) to mount in a namespace")
    done = subprocess.run(
        [unshare, "--mount", "sh", "-c", whole], capture_output=True, text=True, check=False
    )
    if done.returncode and "mount" in done.stderr + done.stdout:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()[:80]}")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def test_real_bind_mounts_have_their_own_device(tmp_path):
    """The bind mount has the same st_dev as its origin, and another than the folder it covers."""
    script = "mkdir a b; mount -t tmpfs none a; mkdir a/in; mount --bind a/in b"
    held, bound = mounted(tmp_path, script, f"{tmp_path}/a", f"{tmp_path}/b/x")
    assert (held["kind"], bound["kind"]) == ("memory", "memory")
    assert bound["mount"] == f"{tmp_path}/b"


def test_real_overlays(tmp_path):
    script = (
        "mkdir t; mount -t tmpfs none t; mkdir t/u t/w t/l t/m t/r; "
        "mount -t overlay o -o lowerdir=$PWD/t/l,upperdir=$PWD/t/u,workdir=$PWD/t/w t/m; "
        "cd t; mount -t overlay o -o lowerdir=l,upperdir=u,workdir=w,index=off r 2>/dev/null || "
        "mount -t tmpfs none r; cd .."
    )
    whole, relative = mounted(tmp_path, script, f"{tmp_path}/t/m/x", f"{tmp_path}/t/r")
    assert (whole["kind"], whole["filesystem"]) == ("memory", "overlay")
    assert "device" not in relative


def test_real_mounts_that_hide_each_other(tmp_path):
    """The longest path in the table may be hidden by a younger, shorter one."""
    script = "mkdir -p a/b; mount -t tmpfs none a/b; mount -t tmpfs other a; mkdir a/b"
    (found,) = mounted(tmp_path, script, f"{tmp_path}/a/b")
    assert found["mount"] == f"{tmp_path}/a"
