"""Without a GPU, kvikio or a readable cufile.json: a reason and a remedy, never more."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tensorspill.gds import cufile_json, probe
from tensorspill.pool.cuda.driver import why_not

NVIDIAS = """\
{
    // NOTE : Application can override custom configuration via CUFILE_ENV_PATH_JSON
    "logging": {
        "dir": "http://not/a/comment", // a comment
        /* one
           over lines */ "level": "ERROR"
    },
    "properties": { "use_pci_p2pdma": true, "gds_rdma_write_support": false }
}
"""


def test_a_cufile_json_with_comments(tmp_path: Path):
    path = tmp_path / "cufile.json"
    path.write_text(NVIDIAS)
    found = cufile_json.read({"CUFILE_ENV_PATH_JSON": str(path)})
    assert (found.path, found.problem) == (str(path), "")
    assert found.properties["use_pci_p2pdma"] is True


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "{'a': 1}", '{"properties": []}', "\0"])
def test_a_cufile_json_that_can_not_be_read(tmp_path: Path, text):
    path = tmp_path / "cufile.json"
    if text is not None:
        path.write_text(text)
    found = cufile_json.read({"CUFILE_ENV_PATH_JSON": str(path)})
    assert found.path == str(path)
    assert found.problem


def run(script: str, folder: Path, *flags: str, **environment: str) -> str:
    """Run a script in a process without a CUDA driver's help; return what it prints."""
    ended = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


CHOOSE = """
    import sys
    from tensorspill.errors import UnsupportedError
    from tensorspill.gds.evidence import missing
    from tensorspill.opening import open_engine
    found = missing()
    print(found.usable, found.why, found.remedy, sep="|")
    for backend in ("auto", "aio", "gds"):
        try:
            open_engine(sys.argv[1], "cuda:0", backend)
        except UnsupportedError as error:
            print(backend, error, sep="|")
    with open_engine(sys.argv[1]) as engine:
        print(engine.name)
"""


@pytest.mark.thorough
def test_kvikio_is_too_old(tmp_path: Path):
    old = tmp_path / "packages" / "kvikio_cu13-24.8.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: kvikio-cu13\nVersion: 24.8.0\n")
    said = run(CHOOSE, tmp_path, PYTHONPATH=str(old.parent)).splitlines()
    assert (
        said[0]
        == "False|no GPUDirect Storage: kvikio 24.8 is too old|Install kvikio 25.10 or newer"
    )
    assert any(line.startswith("gds|") and "too old" in line for line in said)
    assert said[-1] == "aio"


@pytest.mark.thorough
def test_kvikio_is_not_installed(tmp_path: Path):
    script = """
        import importlib.metadata as metadata, sys
        find = metadata.version
        def version(name):
            if name.startswith("kvikio"):
                raise metadata.PackageNotFoundError(name)
            return find(name)
        metadata.version = version
    """
    said = run(textwrap.dedent(script) + textwrap.dedent(CHOOSE), tmp_path).splitlines()
    assert said[0].startswith("False|no GPUDirect Storage: kvikio is not installed|Install")
    assert said[-1] == "aio"


@pytest.mark.skipif(why_not() is None, reason="there is a CUDA driver")
def test_no_driver(tmp_path: Path):
    said = run(CHOOSE, tmp_path).splitlines()
    assert len(said) == 5
    assert all("libcuda" in line or "kvikio" in line for line in said[:4])
    assert said[-1] == "aio"


@pytest.mark.skipif(why_not() is None, reason="there is a CUDA driver")
def test_a_probe_without_a_driver(tmp_path: Path):
    (tmp_path / "x").touch()
    begin = time.monotonic()
    report = probe.run(str(tmp_path / "x"), 0, 60)
    assert time.monotonic() - begin < 60
    assert report.failure
    assert not report.hung


def test_a_probe_that_runs_out_of_time(tmp_path: Path):
    report = probe.run(str(tmp_path), 0, 0.01)
    assert report.hung
    assert "its start" in report.failure


def test_the_host_path_costs_nothing_new(tmp_path: Path):
    script = """
        import sys
        from tensorspill import open_engine
        with open_engine(sys.argv[1]):
            pass
        print([name for name in sys.modules if name.startswith(("tensorspill.gds", "kvikio"))])
        print("libcuda.so" in open("/proc/self/maps").read())
    """
    assert run(script, tmp_path).splitlines() == ["[]", "False"]
