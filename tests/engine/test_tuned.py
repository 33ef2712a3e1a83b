"""Settings files: what engines take from them, and what they don't mind."""

import json
import logging
import os

import pytest

from tensorspill.engine.tuned import read_tuned, settings_path, write_tuned
from tensorspill.errors import BrokenError
from tensorspill.opening import device_key, open_engine


@pytest.fixture
def settings(tmp_path, monkeypatch):
    path = tmp_path / "settings" / "tuned.json"
    monkeypatch.setenv("TENSORSPILL_TUNED", str(path))
    return path


def test_where_they_are(monkeypatch):
    monkeypatch.setenv("TENSORSPILL_TUNED", "/x/y.json")
    assert settings_path() == "/x/y.json"
    monkeypatch.setenv("TENSORSPILL_TUNED", "")
    assert settings_path() is None
    monkeypatch.delenv("TENSORSPILL_TUNED")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/mine")
    assert settings_path() == "/etc/mine/tensorspill/tuned.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert settings_path() == "/home/me/.config/tensorspill/tuned.json"


def test_engines_use_them_by_default(settings, tmp_path):
    options = {"block_bytes": 1 << 19, "depth": 7, "threads": 2}
    assert write_tuned(device_key(tmp_path), "aio", options) == str(settings)
    with open_engine(tmp_path) as engine:
        found = engine.statistics().options
        assert {name: found[name] for name in options} == {
            name: (value, "tuned") for name, value in options.items()
        }
        assert found["direct"] == ("auto", "default")
    with open_engine(tmp_path, depth=3) as engine:
        assert engine.statistics().options["depth"] == (3, "argument")
        assert engine.statistics().options["threads"] == (2, "tuned")


def test_other_devices_and_engines_keep_theirs(settings, tmp_path):
    write_tuned("host/a/ext4", "aio", {"depth": 1})
    write_tuned("host/a/ext4", "gds", {"depth": 2})
    write_tuned("host/b/xfs", "aio", {"depth": 3})
    write_tuned("host/a/ext4", "aio", {"depth": 4})
    assert read_tuned("host/a/ext4", "aio") == {"depth": 4}
    assert read_tuned("host/a/ext4", "gds") == {"depth": 2}
    assert read_tuned("host/b/xfs", "aio") == {"depth": 3}
    assert read_tuned("host/c/xfs", "aio") == {}
    assert settings.stat().st_mode & 0o777 == 0o600
    assert list(settings.parent.iterdir()) == [settings]
    with open_engine(tmp_path) as engine:
        assert engine.statistics().options["depth"][1] == "default"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{" * 100_000,
        b'{"form": "tensorspill-tuned", "version": 1, "devices": {"d": 5}}',
        b'{"form": "tensorspill-tuned", "version": 1, "devices": {"d": {"aio": [1]}}}',
        b'{"form": "tensorspill-tuned", "version": 2, "devices": {"d": {"aio": {"depth": 9}}}}',
        b'{"form": "another", "version": 1, "devices": {"d": {"aio": {"depth": 9}}}}',
    ],
)
def test_a_file_that_is_none_keeps_no_engine_from_opening(content, settings, tmp_path):
    settings.parent.mkdir()
    settings.write_bytes(content)
    assert read_tuned("d", "aio") == {}
    with open_engine(tmp_path) as engine:
        assert engine.statistics().options["depth"][1] == "default"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("depth", 0),
        ("depth", True),
        ("depth", "8"),
        ("depth", 1.5),
        ("threads", 257),
        ("block_bytes", 5000),
        ("block_bytes", 1 << 31),
        ("direct", "no"),
    ],
)
def test_values_out_of_range_are_left_out(name, value, settings, tmp_path):
    write_tuned(device_key(tmp_path), "aio", {name: value, "block_bytes": 8192} | {name: value})
    with open_engine(tmp_path) as engine:
        assert engine.statistics().options[name][1] == "default"


def test_a_broken_file_is_replaced(settings, caplog):
    settings.parent.mkdir()
    settings.write_text("nonsense")
    with caplog.at_level(logging.WARNING):
        write_tuned("d", "aio", {"depth": 2})
    assert "no settings file" in caplog.text
    assert json.loads(settings.read_text())["devices"] == {"d": {"aio": {"depth": 2}}}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_not_used(settings):
    write_tuned("d", "aio", {"depth": 2})
    os.chown(settings, 12345, 12345)
    assert read_tuned("d", "aio") == {}


def test_a_folder_that_can_not_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TENSORSPILL_TUNED", str(tmp_path / "file" / "tuned.json"))
    assert read_tuned("d", "aio") == {}
    with pytest.raises(BrokenError, match="settings"):
        write_tuned("d", "aio", {"depth": 2})
    monkeypatch.setenv("TENSORSPILL_TUNED", "")
    assert write_tuned("d", "aio", {"depth": 2}) is None
