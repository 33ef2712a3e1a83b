"""Choosing the folder on the nearest drive."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from tensorspill.errors import UnsupportedError
from tensorspill.topology import LaunchedRank, Mount, distance, nearest_folder
from tensorspill.topology.machines import machine
from tensorspill.topology.process import Process
from tests.topology.trees import machines


def mounted(known):
    """Return a machine with a file system on each drive, and the folders."""
    mounts = [
        Mount(path=f"/mnt/{drive.name}", filesystem="xfs", device=drive.name)
        for drive in known.drives
    ]
    folders = [f"/mnt/{drive.name}/spill" for drive in known.drives]
    return dataclasses.replace(known, mounts=tuple(mounts)), folders


def rank(local, world=8):
    return LaunchedRank(local, world, local, world, 0, "torchrun")


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "aws-p5"])
def test_every_rank_gets_a_drive_near_its_gpu(name):
    known, folders = mounted(machine(name))
    drives = {f"/mnt/{drive.name}/spill": drive for drive in known.drives}
    chosen = [nearest_folder(folders, known, rank(n), Process()) for n in range(8)]
    for gpu, folder in zip(known.gpus, chosen, strict=False):
        near = min(distance(known, gpu, drive).rank for drive in known.drives)
        assert distance(known, gpu, drives[folder]).rank == near
    assert len(set(chosen)) > 1


def test_ranks_that_are_equally_near_are_spread():
    known, folders = mounted(machine("plain"))
    if len(folders) < 2:
        folders = [*folders, folders[0] + "/other"]
    chosen = {nearest_folder(folders, known, rank(n), Process()) for n in range(len(folders))}
    assert chosen == set(folders)


@hypothesis.given(machines(), st.integers(0, 7), st.data())
def test_any_machine(known, local, data):
    known, folders = mounted(known)
    folders = data.draw(st.permutations([*folders, "/nowhere"]))
    found = nearest_folder(folders, known, rank(local), Process())
    assert found in folders
    if known.drives:
        assert found != "/nowhere"


def test_here(tmp_path):
    assert nearest_folder([tmp_path / "a"]) == str(tmp_path / "a")
    assert nearest_folder([tmp_path / "a", tmp_path / "b"], launch=rank(1)) == str(tmp_path / "b")
    with pytest.raises(UnsupportedError):
        nearest_folder([])
