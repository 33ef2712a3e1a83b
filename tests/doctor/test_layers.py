"""The layers, on trees of machines with GPUs: what is there, what lacks, what can't be read."""

import json
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorspill.doctor.examination import examine
from tensorspill.doctor.row import Row, guarded
from tensorspill.topology.machines import names
from tests.doctor.trees import OPEN_MODULES, config_with_acs, gpu_tree, put
from tests.thorough import examples

LAYERS = {
    "driver", "GPU", "kvikio", "cuFile", "nvidia-fs or P2PDMA", "cufile.json", "BAR1",
    "IOMMU and ACS", "folder", "file system", "block device", "O_DIRECT alignment", "AIO limits",
    "memlock", "huge pages",
}  # fmt: skip


def layers(root, path="/raid/x"):
    found = examine(path, str(root))
    rows = {row.layer: row for row in found.rows}
    assert rows.keys() == LAYERS
    assert all(row.state in ("ok", "no", "unknown") for row in found.rows + found.backends)
    assert all(row.evidence for row in found.rows + found.backends)
    # Nothing is known to work that was not tried.
    assert {row.state for row in found.backends} == {"unknown"}
    json.dumps(found.to_json())
    return rows


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ready", [True, False])
def test_known_machines(name, ready, tmp_path):
    known = gpu_tree(tmp_path, name, ready=ready)
    rows = layers(tmp_path)
    assert rows["driver"].state == ("ok" if ready else "no")
    assert (rows["GPU"].state == "ok") == bool(known.gpus) or not known.gpus
    assert rows["AIO limits"].state == rows["memlock"].state == rows["huge pages"].state == "ok"


def test_a_machine_that_lacks_nothing(tmp_path):
    gpu_tree(tmp_path)
    rows = layers(tmp_path)
    assert "580.65.06" in rows["driver"].evidence
    assert rows["nvidia-fs or P2PDMA"] == Row(
        "nvidia-fs or P2PDMA", "ok", "nvidia-fs version: 2.26.6"
    )
    assert rows["BAR1"].state == "ok"
    assert rows["BAR1"].evidence.startswith("8 x 80 GiB")
    assert rows["IOMMU and ACS"].state == "ok"
    assert rows["file system"].evidence == "xfs mounted at /raid"
    assert "RAID 0" in rows["block device"].evidence
    assert rows["cufile.json"].state == "ok"
    assert "use_pci_p2pdma False" in rows["cufile.json"].evidence


def test_small_bar1(tmp_path):
    known = gpu_tree(tmp_path)
    where = f"sys/bus/pci/devices/{known.gpus[3].bdf}/resource"
    put(tmp_path, where, "0x0 0xffffff 0x0\n0xe0000000 0xefffffff 0x0\n")
    row = layers(tmp_path)["BAR1"]
    assert row.state == "no"
    assert "Resizable BAR" in row.remedy
    assert "7 x 80 GiB" in row.evidence
    assert "256 MiB" in row.evidence


@pytest.mark.parametrize("control", [0x04, 0x08, 0x1D])
def test_acs_that_redirects(control, tmp_path):
    known = gpu_tree(tmp_path)
    bridge = known.ancestors(known.gpus[0])[0].name
    put(tmp_path, f"sys/bus/pci/devices/{bridge}/config", config_with_acs(control))
    row = layers(tmp_path)["IOMMU and ACS"]
    assert row.state == "no"
    assert bridge in row.evidence
    assert "ACS" in row.remedy


def test_configuration_space_that_is_cut_off_or_endless(tmp_path):
    known = gpu_tree(tmp_path)
    first, second = (bridge.name for bridge in known.ancestors(known.gpus[0])[:2])
    put(tmp_path, f"sys/bus/pci/devices/{first}/config", bytes(64))
    endless = bytearray(4096)
    endless[0x100:0x104] = (0x100 << 20 | 1).to_bytes(4, "little")
    put(tmp_path, f"sys/bus/pci/devices/{second}/config", bytes(endless))
    row = layers(tmp_path)["IOMMU and ACS"]
    assert row.state == "unknown"
    assert "ACS of 1 bridges" in row.evidence


@pytest.mark.parametrize(
    ("kind", "state"), [("DMA-FQ", "no"), ("identity", "ok"), (None, "unknown")]
)
def test_iommu(kind, state, tmp_path):
    gpu_tree(tmp_path)
    (tmp_path / "sys/class/iommu/dmar0").mkdir(parents=True)
    if kind:
        put(tmp_path, "sys/kernel/iommu_groups/7/type", kind)
    assert layers(tmp_path)["IOMMU and ACS"].state == state


def test_what_p2pdma_needs(tmp_path):
    gpu_tree(tmp_path)
    os.remove(tmp_path / "proc/driver/nvidia-fs/version")
    put(tmp_path, "proc/driver/nvidia/params", 'RegistryDwords: "RMForceStaticBar1=1;"')
    row = layers(tmp_path)["nvidia-fs or P2PDMA"]
    assert row.state == "ok"
    assert "P2PDMA" in row.evidence
    for path, content, said in (
        ("proc/sys/kernel/osrelease", "5.15.0-generic", "kernel 5.15.0-generic"),
        ("proc/driver/nvidia/version", OPEN_MODULES.replace("Open ", ""), "not the open ones"),
        ("proc/driver/nvidia/version", OPEN_MODULES.replace("580", "550"), "modules 550.65"),
        ("proc/driver/nvidia/params", "RegistryDwords:", "RMForceStaticBar1"),
        ("sys/module/nvme_core/parameters/multipath", "Y", "multipath"),
    ):
        before = (tmp_path / path).read_text() if (tmp_path / path).exists() else "N"
        put(tmp_path, path, content)
        row = layers(tmp_path)["nvidia-fs or P2PDMA"]
        assert row.state == "no"
        assert said in row.evidence
        assert "multipath=N" in row.remedy
        put(tmp_path, path, before)


@pytest.mark.parametrize(
    ("path", "content", "layer"),
    [
        ("proc/sys/fs/aio-nr", "65530\n", "AIO limits"),
        (
            "proc/self/limits",
            "Max locked memory         65536                65536                bytes\n",
            "memlock",
        ),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n", "huge pages"),
        ("etc/cufile.json", "{", "cufile.json"),
        ("etc/cufile.json", "[1]", "cufile.json"),
        ("proc/driver/nvidia/version", "", "driver"),
    ],
)
def test_what_is_not_as_it_should_be(path, content, layer, tmp_path):
    gpu_tree(tmp_path)
    put(tmp_path, path, content)
    row = layers(tmp_path)[layer]
    assert row.state == "no"
    assert row.remedy


def test_an_array_and_drives_of_other_kinds(tmp_path):
    known = gpu_tree(tmp_path)
    table = (tmp_path / "proc/self/mountinfo").read_text()
    lines = [
        "90 1 259:0 / /one rw - ext4 /dev/nvme0n1 rw,data=ordered",
        "91 1 259:1 / /two rw - ext4 /dev/nvme1n1 rw,data=journal",
        "92 1 0:77 / /memory rw - tmpfs none rw",
        "93 1 0:78 / /far rw - lustre far:/x rw",
        "94 1 259:2 / /btrfs rw - btrfs /dev/nvme2n1 rw",
    ]
    put(tmp_path, "proc/self/mountinfo", table + "\n".join(lines) + "\n")
    one = layers(tmp_path, "/one")
    assert one["file system"].state == one["block device"].state == "ok"
    assert known.drives[0].name in one["block device"].evidence
    assert layers(tmp_path, "/memory")["block device"].state == "no"
    far = layers(tmp_path, "/far/x")
    assert far["file system"].state == "ok"
    assert "RDMA" in far["file system"].evidence
    assert layers(tmp_path, "/btrfs")["file system"].state == "no"


def test_an_empty_folder_and_none(tmp_path):
    for root in (tmp_path, tmp_path / "missing"):
        rows = layers(root)
        assert rows["GPU"].state == "no"
        assert {rows[name].state for name in ("memlock", "AIO limits", "huge pages")} == {"unknown"}


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_trees_in_which_anything_is_broken(seed, tmp_path_factory):
    root, chance = tmp_path_factory.mktemp("tree"), random.Random(seed)
    gpu_tree(root, chance.choice(names()))
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in chance.sample(files, min(len(files), 60)):
        path.unlink()
        match chance.randrange(6):
            case 0:
                os.mkfifo(path)
            case 1:
                path.mkdir()
            case 2:
                path.symlink_to(path.name)
            case 3:
                path.write_bytes(chance.randbytes(200))
            case 4:
                path.write_text("-9999999999999999999999999 \x1b[31m[bold]\n" * 3)
    layers(root)


def test_a_layer_that_fails_is_unknown():
    def fail():
        raise ZeroDivisionError("by zero")

    row = guarded("bus", fail)
    assert row == Row("bus", "unknown", "Not looked at: ZeroDivisionError: by zero")
