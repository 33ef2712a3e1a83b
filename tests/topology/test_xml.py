"""NCCL's and hwloc's XML."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorspill.errors import BrokenError, MissingFileError, SpillError, UnsupportedError
from tensorspill.topology import NvLink
from tensorspill.topology.discovery import read_hwloc_xml, read_nccl_xml
from tensorspill.topology.discovery.xml_files import cpus_of_mask
from tensorspill.topology.distances import distance
from tensorspill.topology.machines import machine, names
from tensorspill.topology.machines.xml_tree import hwloc_xml, nccl_xml
from tests.thorough import examples
from tests.topology.trees import facts, is_virtual

NCCL = """<system version="1">
  <cpu numaid="0" affinity="000000ff,ffff0000,00ffffff" arch="x86_64">
    <pci busid="0000:16:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:18:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1">
          <nvlink target="0000:07:00.0" count="5" tclass="0x068000"/>
          <nvlink target="0000:06:00.0" count="13" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:19:00.0" class="0x020000" link_speed="32.0 GT/s PCIe" link_width="0">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1">
    <pci busid="00000000:3B:00.0" class="0x030200">
      <gpu><nvlink target="0000:18:00.0" count="2" tclass="0x030200"/></gpu>
    </pci>
  </cpu>
</system>"""


@pytest.fixture
def write(tmp_path):
    def writing(text: str | bytes, name: str = "topology.xml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return writing


def test_an_nccl_file_as_nccl_writes_it(write):
    found = read_nccl_xml(write(NCCL))
    first, second = found.gpus
    assert (first.bdf, second.bdf) == ("0000:18:00.0", "0000:3b:00.0")
    assert first.nvlinks == (NvLink(peer="nvswitch", count=18),)
    assert second.nvlinks == (NvLink(peer="0000:18:00.0", count=2),)
    assert found.nodes[0].cpus == (*range(24), *range(48, 72))
    (nic,) = found.nics
    assert (nic.name, nic.kind, nic.mbps, nic.link_mbps) == ("mlx5_0", "roce", 50000, None)
    assert "'0'" in nic.why("link_mbps")
    assert distance(found, first, nic).kind == "PIX"
    assert distance(found, second, nic).kind == "SYS"


@pytest.mark.parametrize("name", [name for name in names() if is_virtual(machine(name))])
def test_nccl_files_of_known_machines_read_back(name, write):
    original = machine(name)
    found = read_nccl_xml(write(nccl_xml(original)))
    assert facts(found, "bridges") == facts(original, "bridges")
    for a, b in zip(found.gpus, original.gpus, strict=True):
        assert (a.bdf, a.parent, a.numa_node, a.link_mbps, a.nvlinks) == (
            b.bdf, b.parent, b.numa_node, b.link_mbps, b.nvlinks,
        )  # fmt: skip
    places = {nic.bdf: (nic.parent, nic.mbps) for nic in original.nics}
    assert {nic.bdf: (nic.parent, nic.mbps) for nic in found.nics} == places


@pytest.mark.parametrize("name", [name for name in names() if not is_virtual(machine(name))])
@pytest.mark.parametrize("version", [2, 3])
def test_hwloc_files_of_known_machines_read_back(name, version, write):
    original = machine(name)
    found = read_hwloc_xml(write(hwloc_xml(original, version)))
    assert found.hostname == name
    assert facts(found, "bridges", "nodes") == facts(original, "bridges", "nodes")
    for kind in ("gpus", "nics", "drives"):
        for a, b in zip(getattr(found, kind), getattr(original, kind), strict=True):
            fields = ("bdf", "parent", "numa_node", "cpus", "link_mbps", "name")
            assert [getattr(a, f) for f in fields] == [getattr(b, f) for f in fields]
    a, b = found.gpus[0], found.drives[0]
    assert distance(found, a, b) == distance(original, original.gpus[0], original.drives[0])


def test_hwlocs_words_for_kinds_of_devices(write):
    text = (
        '<topology version="3.0"><object type="Machine"><object type="Bridge" bridge_type="0-1" '
        'bridge_pci="0000:[00-04]"><object type="PCIDev" pci_busid="0000:01:00.0" '
        'pci_type="0108 [144d:a80a] [144d:0000] 00"><object type="OSDev" name="nvme0n1" '
        'osdev_type="Storage"/></object></object></object></topology>'
    )
    (drive,) = read_hwloc_xml(write(text)).drives
    assert (drive.name, drive.parent, drive.numa_node) == ("nvme0n1", "pci0000:00", None)
    assert drive.why("numa_node")


@pytest.mark.parametrize("read", [read_nccl_xml, read_hwloc_xml])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no XML"),
        ("<system><cpu>", "is no XML"),
        ("<html/>", "starts with <html>"),
        (b"\xff\xfe\x00", "is no XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', "declares entities"),
    ],
)
def test_other_files_are_refused_by_name(read, text, why, write):
    path = write(text)
    with pytest.raises(UnsupportedError, match=why) as caught:
        read(path)
    assert caught.value.path == path


@pytest.mark.parametrize("read", [read_nccl_xml, read_hwloc_xml])
def test_files_that_cant_be_read(read, tmp_path):
    with pytest.raises(MissingFileError):
        read(tmp_path / "missing.xml")
    with pytest.raises(BrokenError):
        read(tmp_path)


def test_a_device_without_an_address_is_refused(write):
    path = write(NCCL.replace('0000:18:00.0" class', 'nowhere" class'))
    with pytest.raises(UnsupportedError, match="No PCI address, but 'nowhere'"):
        read_nccl_xml(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xml")
    original = machine("adversarial")
    return folder / "cut.xml", nccl_xml(original).encode(), hwloc_xml(original).encode()


@settings(max_examples=examples(150))
@given(which=st.booleans(), place=st.floats(0, 1), change=st.binary(max_size=8), cut=st.booleans())
def test_a_cut_or_garbled_file_is_read_or_refused(texts, which, place, change, cut):
    path, nccl, hwloc = texts
    whole = nccl if which else hwloc
    at = int(place * len(whole))
    path.write_bytes(whole[:at] if cut else whole[:at] + change + whole[at + len(change) :])
    refused = None
    try:
        (read_nccl_xml if which else read_hwloc_xml)(path)
    except SpillError as error:
        refused = error
    assert refused is None or refused.path == str(path)
    assert refused or not cut or at == len(whole)


@pytest.mark.parametrize(
    ("read", "start", "element"),
    [
        (read_nccl_xml, "<system><cpu>", '<pci busid="00:00.0" class="0x060400">'),
        (read_hwloc_xml, "<topology>", '<object type="Group">'),
    ],
)
def test_deep_nesting_is_refused(read, start, element, write):
    ends = "".join(f"</{part.split()[0]}>" for part in reversed(start[1:-1].split("><")))
    name = element[1:].split()[0]
    path = write(start + element * 3000 + f"</{name}>" * 3000 + ends)
    with pytest.raises(UnsupportedError, match="nested too deeply") as caught:
        read(path)
    assert caught.value.path == path


def test_masks():
    assert cpus_of_mask("00000003,80000001") == (0, 31, 32, 33)
    assert cpus_of_mask("0x00000001,,,0x0") == (96,)
    assert cpus_of_mask("") == cpus_of_mask("xyz") == ()
