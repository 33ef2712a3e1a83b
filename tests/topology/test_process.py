"""What a process may use, and CUDA's numbers of GPUs."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.errors import UnsupportedError
from tensorspill.topology import Machine, Mig
from tensorspill.topology.machines import machine
from tensorspill.topology.process import (
    Process,
    VisibleGpu,
    current_process,
    gpu_of_rank,
    visible_gpus,
)


def node() -> Machine:
    """A DGX H100 whose GPUs have UUIDs, two of which begin alike; the last has two slices."""
    original = machine("dgx-h100")
    gpus = []
    for index, gpu in enumerate(original.gpus):
        letter = "aabcdefg"[index]
        uuid = f"GPU-{letter}{letter}{index}00000-1111-2222-3333-444455556666"
        migs: tuple[Mig, ...] = ()
        if index == 7:
            migs = tuple(Mig(index=i, uuid=f"MIG-{i}{i}-5555") for i in range(2))
        gpus.append(replace(gpu, uuid=uuid, migs=migs))
    return replace(original, gpus=tuple(gpus))


NODE = node()
BDFS = [gpu.bdf for gpu in NODE.gpus]


def bdfs(visible: str | None, **fields) -> list[str | None]:
    return [gpu.bdf for gpu in visible_gpus(NODE, Process(visible=visible, **fields))]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        ("3,1", [3, 1]),
        (" 3 , 1 ", [3, 1]),
        ("-1", []),
        ("NoDevFiles", []),
        # As in CUDA, the list ends at the first entry that is no GPU.
        ("2,9,1", [2]),
        ("0,1,x,2", [0, 1]),
        ("GPU-b", [2]),
        ("GPU-gg700000-1111-2222-3333-444455556666,0", [7, 0]),
        ("GPU-zz,0", []),
        ("GPU-", []),
    ],
)
def test_visible_devices(visible, expected):
    assert bdfs(visible) == [BDFS[i] for i in expected]


def test_slices():
    found = visible_gpus(NODE, Process(visible="MIG-11-5555,MIG-00-5555"))
    assert [(gpu.bdf, gpu.mig) for gpu in found] == [
        (BDFS[7], "MIG-11-5555"), (BDFS[7], "MIG-00-5555"),
    ]  # fmt: skip
    (old,) = visible_gpus(NODE, Process(visible=f"MIG-{NODE.gpus[3].uuid}/1/0"))
    assert (old.bdf, old.mig) == (BDFS[3], f"MIG-{NODE.gpus[3].uuid}/1/0")
    assert visible_gpus(NODE, Process(visible="MIG-nope")) == ()


def test_ambiguous_and_repeated_entries_are_errors():
    with pytest.raises(UnsupportedError, match="'GPU-aa' fits 2 GPUs"):
        bdfs("GPU-aa")
    with pytest.raises(UnsupportedError, match=f"names the GPU {BDFS[1]} twice"):
        bdfs("1,0,1")
    with pytest.raises(UnsupportedError, match="twice"):
        bdfs(f"0,{NODE.gpus[0].uuid}")


def test_gpus_of_several_models_are_numbered_by_speed_unless_told_otherwise():
    mixed = replace(NODE, gpus=(replace(NODE.gpus[0], name="NVIDIA T4"), *NODE.gpus[1:]))
    first, *_ = visible_gpus(mixed, Process(visible="0"))
    assert first.bdf is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in first.why("bdf")
    (first,) = visible_gpus(mixed, Process(visible="0", order="PCI_BUS_ID"))
    assert first.bdf == BDFS[0]
    # A UUID needs no number.
    (last,) = visible_gpus(mixed, Process(visible="GPU-gg"))
    assert last.bdf == BDFS[7]


def test_gpus_that_the_driver_does_not_show_have_no_number():
    hidden = replace(
        NODE, gpus=tuple(replace(g, index=None) if g.index == 0 else g for g in NODE.gpus)
    )
    assert [gpu.bdf for gpu in visible_gpus(hidden, Process())] == BDFS[1:]


def test_the_gpu_of_a_rank():
    assert gpu_of_rank(NODE, Process(), 5, 13).bdf == BDFS[5]
    # Launchers that show each rank one GPU still number ranks within the node.
    assert gpu_of_rank(NODE, Process(visible="6"), 5, 13).bdf == BDFS[6]
    with pytest.raises(UnsupportedError, match=r"Rank 13 has no GPU: its local rank is 5.*'3,4'"):
        gpu_of_rank(NODE, Process(visible="3,4"), 5, 13)
    with pytest.raises(UnsupportedError, match="Rank 0 has no GPU"):
        gpu_of_rank(machine("plain"), Process(visible=""), 0, 0)
    with pytest.raises(UnsupportedError, match="Rank 9 has no GPU"):
        gpu_of_rank(NODE, Process(), -1, 9)


@given(st.text(alphabet="0123456789,-GPUMIab ", max_size=20))
def test_any_text_is_resolved_or_refused(visible):
    found: tuple[VisibleGpu, ...] = ()
    refused = "CUDA_VISIBLE_DEVICES"
    try:
        found = visible_gpus(NODE, Process(visible=visible))
    except UnsupportedError as error:
        refused = str(error)
    assert all(gpu.bdf in BDFS for gpu in found)
    assert "CUDA_VISIBLE_DEVICES" in refused


def test_this_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = current_process()
    assert set(found.cpus) == os.sched_getaffinity(0)
    assert found.nodes
    assert found.visible == "1"
    assert current_process(environ={}).why("visible") == "CUDA_VISIBLE_DEVICES is not set"


def test_a_process_without_procfs(tmp_path):
    found = current_process(str(tmp_path), {})
    assert found.cpus == found.nodes == ()
    assert Process.parse(found.dump()) == found
