from pathlib import Path

import pytest
import torch

import tensorspill
from tensorspill.errors import UnsupportedError
from tensorspill.opening import Choice, choose_engine


def test_auto_takes_the_host_path_without_a_gpu(tmp_path: Path):
    with tensorspill.open_engine(tmp_path) as engine:
        assert engine.name == "aio"
        assert engine.statistics().device == "cpu"


def test_the_environment_says_what_auto_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TENSORSPILL_BACKEND", "fast")
    with pytest.raises(UnsupportedError, match="fast"):
        tensorspill.open_engine(tmp_path)
    with tensorspill.open_engine(tmp_path, backend="aio") as engine:
        assert engine.name == "aio"


def test_a_choice_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert choose_engine(tmp_path) == Choice(
        "aio", torch.device("cpu"), "the tensors are in host memory"
    )
    monkeypatch.setenv("TENSORSPILL_BACKEND", "aio")
    assert choose_engine(tmp_path).asked


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"backend": "uring"}, "uring"),
        ({"device": "meta"}, "meta"),
        ({"backend": "gds"}, "gds"),
        ({"block_bytes": 1000}, "block_bytes"),
        ({"block_bytes": 2 << 30}, "block_bytes"),
        ({"depth": 0}, "depth"),
        ({"threads": 0}, "threads"),
        ({"direct": "maybe"}, "maybe"),
        ({"dpeth": 4}, "dpeth"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments, match):
    with pytest.raises(UnsupportedError, match=match):
        tensorspill.open_engine(tmp_path, **arguments)
