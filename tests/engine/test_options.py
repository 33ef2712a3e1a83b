from dataclasses import dataclass

import pytest

from tensorspill.engine import resolve
from tensorspill.errors import UnsupportedError


@dataclass(frozen=True)
class Options:
    depth: int = 8
    block_bytes: int = 4096
    mode: str = "auto"

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise UnsupportedError("depth")


def test_argument_then_environment_then_tuned_then_default():
    environment = {"TENSORSPILL_DEPTH": "16", "TENSORSPILL_BLOCK_BYTES": "1MiB"}
    tuned = {"depth": 32, "block_bytes": 8192, "mode": "yes"}
    resolved = resolve(Options, {"depth": 64}, tuned, environment)
    assert resolved.values == Options(64, 1 << 20, "yes")
    assert resolved.described() == {
        "depth": (64, "argument"),
        "block_bytes": (1 << 20, "environment"),
        "mode": ("yes", "tuned"),
    }
    assert resolve(Options, {}, None, {}).described()["depth"] == (8, "default")


def test_none_is_not_given():
    assert resolve(Options, {"depth": None}, None, {}).sources["depth"] == "default"


def test_sizes_may_be_text():
    assert resolve(Options, {"block_bytes": "64KiB"}, None, {}).values.block_bytes == 65536


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"deepth": 4}, "deepth"),
        ({"depth": "many"}, "many"),
        ({"depth": 1.5}, r"1\.5"),
        ({"depth": True}, "True"),
        ({"depth": 0}, "depth"),
    ],
)
def test_bad_options(arguments, match):
    with pytest.raises(UnsupportedError, match=match):
        resolve(Options, arguments, None, {})
