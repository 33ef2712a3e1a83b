"""On the stand-in driver, where there is a GPU: what works, and each of cuFile's codes."""

import json

import pytest

from tensorspill.gds.codes import BY_CODE
from tests.standin.build import UnavailableError
from tests.standin.child import run_python
from tests.standin.lanes import lane

_COMMAND = """
import sys
from tensorspill.cli import main
sys.exit(main(["doctor", "--json", "--backend", sys.argv[1], sys.argv[2]]))
"""


def doctor(lane_name, folder, backend="gds", rules=""):
    """Return the exit status, and the rows by layer."""
    try:
        chosen = lane(lane_name)
    except UnavailableError as error:
        pytest.skip(str(error))
    environment = {"STANDIN_CUFILE_RULES": rules} if rules else {}
    ended = run_python(chosen, _COMMAND, backend, str(folder), environment=environment)
    assert ended.returncode in (0, 1), ended.errors
    found = json.loads(ended.output)
    assert list(folder.iterdir()) == []
    return ended.returncode, {row["layer"]: row for row in found["rows"] + found["backends"]}


def test_everything_works(tmp_path):
    status, rows = doctor("cufile", tmp_path)
    assert status == 0
    works = ("driver", "GPU", "kvikio", "cuFile", "nvidia-fs or P2PDMA", "cufile.json", "gds")
    assert {rows[name]["state"] for name in works} == {"ok"}
    assert rows["auto"]["evidence"].startswith("gds: ")


@pytest.mark.parametrize(
    ("name", "said"),
    [("compat", "turns it off"), pytest.param("real", "host memory", marks=pytest.mark.thorough)],
)
@pytest.mark.thorough
def test_only_through_host_memory(name, said, tmp_path):
    status, rows = doctor(name, tmp_path)
    assert status == 1
    assert rows["gds"]["state"] == "no"
    assert said in rows["gds"]["evidence"]
    assert rows["auto"]["state"] == "ok"
    assert rows["auto"]["evidence"].startswith("aio: ")


@pytest.mark.thorough
def test_a_code_of_cufile_has_its_remedy(tmp_path):
    code = 5027
    status, rows = doctor("cufile", tmp_path, rules=f"cuFileHandleRegister={code}")
    assert status == 1
    assert rows["cuFile"]["state"] == rows["gds"]["state"] == "no"
    assert str(code) in rows["cuFile"]["evidence"]
    assert rows["cuFile"]["remedy"] == rows["gds"]["remedy"] == BY_CODE[code].remedy


@pytest.mark.thorough
def test_memory_that_can_not_be_registered(tmp_path):
    status, rows = doctor("cufile", tmp_path, "auto", "cuFileBufRegister=5036")
    # It works all the same, through cuFile's own buffers.
    assert status == 0
    assert rows["BAR1"]["state"] == "no"
    assert rows["BAR1"]["remedy"] == BY_CODE[5036].remedy
