"""The tree and what is built from it hold the same modules, and importing starts nothing."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRONT = ROOT / "src" / "tensorspill"

#: Everything that a build reads.
INPUTS = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def mapped_folders() -> dict[str, str]:
    """Return the folder at the top of the tree of each package that setup.cfg maps."""
    pairs = (line.split("=") for line in _options()["package_dir"].strip().splitlines())
    return {package.strip(): folder.strip() for package, folder in pairs if package.strip()}


def listed() -> list[str]:
    return _options()["packages"].split()


def _options() -> configparser.SectionProxy:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config["options"]


def modules() -> set[str]:
    """Return the paths of all modules inside the package, such as "tensorspill/pool/live.py"."""
    # Path.rglob does not follow the links.
    found = set()
    for folder, _, names in os.walk(FRONT, followlinks=True):
        inside = Path(folder).relative_to(FRONT.parent)
        found |= {(inside / name).as_posix() for name in names if name.endswith(".py")}
    return found


def test_every_subpackage_is_listed() -> None:
    on_disk = {str(Path(module).parent).replace("/", ".") for module in modules()}
    assert sorted(listed()) == sorted(on_disk)


def test_every_package_has_an_init() -> None:
    without = {p for p in listed() if f"{p.replace('.', '/')}/__init__.py" not in modules()}
    assert not without


def test_links_agree_with_the_mapping() -> None:
    links = {f"tensorspill.{p.name}": os.readlink(p) for p in FRONT.iterdir() if p.is_symlink()}
    mapped = {package: f"../../{folder}" for package, folder in mapped_folders().items()}
    assert links == mapped


def test_no_module_hides_one_of_the_standard_library() -> None:
    # With a mapped folder as working directory, such a module would be imported instead.
    names = {Path(module).stem for module in modules()}
    assert not names & {"io", "queue", "select", "signal", "socket", "threading", "types"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build a source distribution, a wheel from the tree and a wheel from the distribution."""
    work = tmp_path_factory.mktemp("build")
    tree = work / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", symlinks=True, ignore=ignore)
    for folder in mapped_folders().values():
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for name in INPUTS:
        shutil.copy(ROOT / name, tree / name)

    sdist = build(tree, "sdist", work / "sdist")
    wheel = build(tree, "wheel", work / "wheel")
    (work / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", sdist, "-C", work / "unpacked"], check=True)
    (unpacked,) = (work / "unpacked").iterdir()
    again = build(unpacked, "wheel", work / "again")
    return {"sdist": sdist, "wheel": wheel, "wheel from sdist": again}


def build(tree: Path, kind: str, out: Path) -> Path:
    """Call the build backend as a front end does, but with the setuptools that is installed."""
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = out.iterdir()
    return result


@pytest.mark.parametrize("kind", ["wheel", "wheel from sdist"])
def test_wheel_holds_every_module(built: dict[str, Path], kind: str) -> None:
    with zipfile.ZipFile(built[kind]) as wheel:
        names = set(wheel.namelist())
    assert {name for name in names if name.endswith(".py")} == modules()
    assert "tensorspill/py.typed" in names


@pytest.mark.parametrize("kind", ["wheel", "wheel from sdist"])
def test_wheel_installs_no_generic_name(built: dict[str, Path], kind: str) -> None:
    with zipfile.ZipFile(built[kind]) as wheel:
        top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not re.fullmatch(r"tensorspill-.*\.dist-info", name)} == {
        "tensorspill"
    }


def test_installed_wheel_imports(built: dict[str, Path], tmp_path: Path) -> None:
    """Unpacked is installed, for a wheel of pure Python; the tree itself is out of reach."""
    with zipfile.ZipFile(built["wheel from sdist"]) as wheel:
        wheel.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import tensorspill, tensorspill.pool, tensorspill.engine, tensorspill.host_fallback\n"
        "import tensorspill.gds, tensorspill.topology\n"
        "print(tensorspill.__file__, tensorspill.pool.__file__, sep='\\n')"
    )
    for file in run(code).split():
        assert Path(file).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    "use",
    [
        "import tensorspill",
        "import tensorspill; [getattr(tensorspill, name) for name in tensorspill.__all__]",
        "import tensorspill.gds, tensorspill.host_fallback, tensorspill.topology",
    ],
)
def test_import_starts_and_loads_nothing(use: str) -> None:
    run(
        "import os, sys, threading, torch, numpy\n"
        "def held(): return [len(os.listdir(f'/proc/self/{kind}')) for kind in ('task', 'fd')]\n"
        "modules, before = set(sys.modules), held()\n"
        f"{use}\n"
        "heavy = {'numba', 'llvmlite', 'kvikio', 'cuda', 'cupy', 'rich', 'matplotlib'}\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - modules}\n"
        "assert not loaded & heavy, loaded & heavy\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert held() == before, (before, held())\n"
        "assert not torch.cuda.is_initialized()\n"
    )


def run(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
