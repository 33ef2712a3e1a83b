"""Sizes as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.errors import UnsupportedError
from tensorspill.pool.sizes import format_bytes, parse_bytes, round_down, round_up


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        (" 1.5 kib ", 1536),
        ("512MB", 512_000_000),
        ("2 tb", 2 * 10**12),
        ("9007199254740993", 2**53 + 1),
        (17, 17),
    ],
)
def test_parse(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "4 GiBs", "-1", "1e9", "4 G", -1])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(UnsupportedError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (4 << 30, "4 GiB"),
        (3 << 50, "3.07e+03 TiB"),
    ],
)
def test_format(nbytes: int, expected: str) -> None:
    assert format_bytes(nbytes) == expected


@given(value=st.integers(0, 1 << 60), step=st.integers(1, 1 << 30))
def test_rounding(value: int, step: int) -> None:
    up, down = round_up(value, step), round_down(value, step)
    assert down <= value <= up < value + step
    assert up % step == down % step == 0
