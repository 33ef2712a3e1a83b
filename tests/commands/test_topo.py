"""``tensorspill topo``."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from tensorspill.cli import main
from tensorspill.commands.topo_text import show
from tensorspill.topology import Machine
from tensorspill.topology.affinity import affinities
from tensorspill.topology.machines import machine, names
from tensorspill.topology.machines.sysfs_tree import write_sysfs
from tensorspill.topology.machines.xml_tree import hwloc_xml, nccl_xml

DRAWS = importlib.util.find_spec("matplotlib") is not None


def test_this_machine(capsys):
    assert main(["topo", "--path", "/"]) == 0
    said = capsys.readouterr().out
    assert "socket" in said
    assert "/ lies on" in said


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_nothing_is_wider_than_the_terminal_nor_lost(name, width, tmp_path):
    whole = machine(name)
    with open(tmp_path / "out", "w", encoding="utf-8") as file:
        console = Console(file=file, width=width, highlight=False)
        show(whole, affinities(whole), console=console)
    said = (tmp_path / "out").read_text(encoding="utf-8")
    assert max(map(len, said.splitlines())) <= width
    # Readable without colour: there is none here.
    assert "\x1b" not in said
    for label in [nic.name for nic in whole.nics] + [drive.name for drive in whole.drives]:
        assert label in said
    for gpu in whole.gpus:
        assert f"GPU {gpu.index} " in said
        assert gpu.bdf in said
    cells = re.findall(r"(?:NV\d+|PIX|PXB|PHB|NODE|SYS|\bX\b|\?)\*?", said)
    count = len(whole.gpus) * (len(whole.gpus) + len(whole.nics) + len(whole.drives))
    assert len(cells) >= count


def test_a_terminal_of_few_characters():
    environ = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "70"}
    done = subprocess.run(
        [sys.executable, "-m", "tensorspill.cli", "topo", "--machine", "dgx-2"],
        capture_output=True, env=environ, check=True,
    )  # fmt: skip
    said = done.stdout.decode("ascii")
    assert "nvme7n1" in said
    assert max(map(len, said.splitlines())) <= 70


def test_json_is_one_value(capsys):
    assert main(["topo", "--machine", "dgx-a100", "--path", "/raid/x", "--json"]) == 0
    said = capsys.readouterr()
    value = json.loads(said.out)
    assert said.err == ""
    assert Machine.from_json(value["machine"]) == machine("dgx-a100")
    assert [rank["drive"] for rank in value["ranks"]] == [f"nvme{i}n1" for i in range(8)]
    devices, classes = value["distances"]["devices"], value["distances"]["classes"]
    assert len(devices) == len(classes) == 24
    assert classes[devices.index("0000:07:00.0")][devices.index("mlx5_1")] == "PXB"
    assert value["path"]["device"] == "md0"
    assert len(value["path"]["warnings"]) == 8


def test_json_of_this_machine(capsys):
    assert main(["topo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["source"].startswith("sysfs")


def test_other_sources(tmp_path, capsys):
    write_sysfs(machine("adversarial"), str(tmp_path / "tree"))
    (tmp_path / "nccl.xml").write_text(nccl_xml(machine("aws-p4d")))
    (tmp_path / "hwloc.xml").write_text(hwloc_xml(machine("dgx-a100"), 3))
    for option, file, gpus in (
        ("--root", "tree", 5),
        ("--nccl", "nccl.xml", 8),
        ("--hwloc", "hwloc.xml", 8),
    ):
        assert main(["topo", option, str(tmp_path / file), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["machine"]["gpus"]) == gpus


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--machine", "dgx-9"], "No machine is known as 'dgx-9'"),
        (["--nccl", "/missing.xml"], "/missing.xml"),
        (["--hwloc", "/dev/null"], "is no XML"),
    ],
)
def test_errors(arguments, why, capsys):
    assert main(["topo", *arguments, "--json"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert why in said.err


@pytest.mark.skipif(DRAWS, reason="matplotlib is installed")
def test_pictures_without_matplotlib(tmp_path, capsys):
    assert main(["topo", "--svg", str(tmp_path / "a.svg")]) == 3
    assert "need matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(not DRAWS, reason="matplotlib is not installed")
class TestPictures:
    """Pictures are looked at by people; here, that they hold everything and are written."""

    @pytest.mark.parametrize("name", names())
    def test_everything_is_in_it(self, name, tmp_path, capsys):
        file = tmp_path / "a.svg"
        assert main(["topo", "--machine", name, "--svg", str(file), "--json"]) == 0
        json.loads(capsys.readouterr().out)
        said, whole = file.read_text(), machine(name)
        for label in [nic.name for nic in whole.nics] + [drive.name for drive in whole.drives]:
            assert f">{label}<" in said
        for gpu in whole.gpus:
            assert f">GPU {gpu.index}<" in said

    def test_png_and_svg_of_this_machine(self, tmp_path):
        svg, png = tmp_path / "a.svg", tmp_path / "a.png"
        assert main(["topo", "--svg", str(svg), "--png", str(png)]) == 0
        assert png.read_bytes().startswith(b"\x89PNG")
        assert svg.read_text().startswith("<?xml")

    def test_the_same_picture_twice(self, tmp_path):
        one, two = tmp_path / "1.svg", tmp_path / "2.svg"
        for file in (one, two):
            assert main(["topo", "--machine", "plain", "--svg", str(file), "--json"]) == 0
        assert one.read_bytes() == two.read_bytes()

    def test_a_place_that_cant_be_written(self, capsys):
        assert main(["topo", "--machine", "plain", "--png", "/no/such/folder/a.png"]) == 3
        assert "Can't write the picture" in capsys.readouterr().err
