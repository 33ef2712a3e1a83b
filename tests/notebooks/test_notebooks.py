"""Every notebook runs from top to bottom with small parameters, and is kept without outputs."""

import ast
import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))

for _name in ("nbclient", "ipykernel", "tqdm", "matplotlib"):
    pytest.importorskip(_name)


def read(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text())


def parameters_of(notebook):
    [cell] = [c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", ())]
    return "".join(cell["source"])


def executed(name, inside, **parameters):
    """Return what the cells of a notebook gave: texts, and pictures as PNG."""
    output = inside / "output.ipynb"
    command = [sys.executable, str(Path(__file__).with_name("execute.py"))]
    command += [str(FOLDER / f"{name}.ipynb"), json.dumps(parameters), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=inside)
    assert done.returncode == 0, done.stderr[-4000:]
    texts, pictures = [], []
    for cell in json.loads(output.read_text())["cells"]:
        for each in cell.get("outputs", ()):
            assert each["output_type"] != "error"
            assert each.get("name") != "stderr", each["text"]
            data = each.get("data", {})
            if "image/png" in data:
                pictures.append(base64.b64decode("".join(data["image/png"])))
            texts.append("".join(data.get("text/markdown", data.get("text/plain", ""))))
    return "\n".join(texts), pictures


def test_there_are_these_three():
    assert NAMES == ["bandwidth", "topology", "training"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_without_outputs_and_says_what_it_does_not_measure(name):
    notebook = read(name)
    text = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert "not measured" in text
    assert "widgets" not in notebook["metadata"]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_plain_values_before_anything_else(name):
    notebook = read(name)
    source = parameters_of(notebook)
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert "".join(first["source"]) == source
    for statement in ast.parse(source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)


def test_bandwidth_measures_the_folder_and_leaves_nothing_there(tmp_path):
    measured, page = tmp_path / "drive", tmp_path / "page.html"
    measured.mkdir()
    text, pictures = executed(
        "bandwidth",
        tmp_path,
        folder=str(measured),
        size="4MiB",
        blocks=["64KiB", "1MiB"],
        depths=[1, 4],
        rounds=2,
        seconds=0.2,
        page=str(page),
    )
    assert list(measured.iterdir()) == []
    assert len(pictures) == 8
    assert f"`{measured}` lies on" in text
    assert "for reads: blocks of" in text
    assert "for writes: blocks of" in text
    assert "transfers; under way for" in text
    assert "- GPU memory" in text
    assert "longer than 0.2 s" in text
    assert page.read_text().startswith("<!doctype html>")


def test_topology_shows_this_machine_and_plans_on_others(tmp_path):
    text, pictures = executed(
        "topology", tmp_path, machines=["dgx-h100", "plain"], nodes=2, params=10**9, path="."
    )
    # This machine, two others, the plans.
    assert len(pictures) == 4
    assert "lies on" in text
    assert "this plan" in text


def test_training_gives_equal_losses_and_leaves_nothing(tmp_path):
    measured = tmp_path / "drive"
    measured.mkdir()
    text, pictures = executed(
        "training", tmp_path, folder=str(measured), layers=3, width=160, batch=8, steps=3
    )
    assert list(measured.iterdir()) == []
    assert len(pictures) == 2
    assert "equal to the last bit" in text
    assert "step 3:" in text
    assert "waiting for the drive" in text
