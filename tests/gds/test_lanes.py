"""The engine on the stand-in driver, in every lane: see `inside`. And what real libraries do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import run_pytest, run_python
from tests.standin.lanes import LANES, Lane, lane

FIND = """
    import sys
    from tensorspill.gds.evidence import find
    from tensorspill.opening import choose_engine
    found = find(sys.argv[1], 0, limit=float(sys.argv[2]))
    print(found.works, found.usable, found.report.hung, found.report.get("mode", "compat"))
    print(found.why)
    print(found.remedy)
    print(choose_engine(sys.argv[1], "cuda:0").backend)
"""

#: What Windows' kernel for Linux says of itself.
UNAME = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/utsname.h>
int uname(struct utsname *name)
{
    int (*real)(struct utsname *) = (int (*)(struct utsname *))dlsym(RTLD_NEXT, "uname");
    int result = real(name);
    strcpy(name->release, "5.15.0-microsoft-standard-WSL2");
    return result;
}
"""


def usable(name: str) -> Lane:
    try:
        return lane(name)
    except UnavailableError as reason:
        pytest.skip(f"lane {name}: {reason}")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name != "cufile")) for name in LANES],
)
def test_the_engine(name: str):
    folder = os.path.join(os.path.dirname(__file__), "inside")
    devices = {"STANDIN_CUDA_DEVICES": "4"}
    report = run_pytest(usable(name), folder, environment=devices, timeout=300)
    assert not report.failed, report.ended.output
    assert report.ended.returncode == 0, report.ended
    assert report.passed > 20


@pytest.mark.skipif(Path("/proc/modules").exists(), reason="libcufile waits without /proc/modules")
def test_a_libcufile_that_waits_for_ever(tmp_path: Path):
    """The real one, on a kernel without modules: the probe ends it, and the host path is taken."""
    ended = run_python(
        usable("real"),
        FIND,
        str(tmp_path),
        "5",
        environment={"LD_PRELOAD": "", "KVIKIO_COMPAT_MODE": "AUTO"},
    )
    assert ended.returncode == 0, ended.errors
    lines = ended.output.splitlines()
    assert lines[0].startswith("False False True")
    assert "hung for 5 s" in lines[1]
    assert "/proc/modules" in lines[2]
    assert lines[3] == "aio"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.thorough
def test_the_windows_subsystem_for_linux(tmp_path: Path):
    """kvikio#11, #97: a kernel that says it is one selects the host path."""
    (tmp_path / "uname.c").write_text(UNAME)
    shim = tmp_path / "uname.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(shim), str(tmp_path / "uname.c"), "-ldl"]
    subprocess.run(command, check=True)
    chosen = usable("real")
    before = chosen.environment.get("LD_PRELOAD", "")
    for preload, compat in ((before, "False"), (f"{shim} {before}", "True")):
        environment = {"LD_PRELOAD": preload, "KVIKIO_COMPAT_MODE": "AUTO"}
        ended = run_python(chosen, FIND, str(tmp_path), "30", environment=environment)
        assert ended.returncode == 0, ended.errors
        lines = ended.output.splitlines()
        assert lines[0].split() == ["False", "True", "False", compat]
        assert ("Windows Subsystem" in lines[1]) == (compat == "True")
        assert lines[3] == "aio"
