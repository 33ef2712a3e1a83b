"""One spelling of PCI addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.errors import UnsupportedError
from tensorspill.topology import Machine
from tensorspill.topology.bdf import as_bdf, is_bdf
from tensorspill.topology.machines import machine


@given(st.integers(0, 0xFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_case_and_width_of_the_domain_do_not_matter(domain, bus, slot, function):
    kernel = f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"
    for text in (kernel, kernel.upper(), f"{domain:08X}:{bus:02X}:{slot:02x}.{function}"):
        assert as_bdf(text) == kernel
    if domain == 0:
        assert as_bdf(kernel.removeprefix("0000:")) == kernel


def test_wide_domains_stay():
    assert as_bdf("10000:01:00.0") == "10000:01:00.0"


@pytest.mark.parametrize(
    "text", ["", "pci0000:00", "0000:00:00.8", "00:20.0", "0:0:0:0.0", "é:0.0"]
)
def test_what_is_no_address_is_refused(text):
    assert not is_bdf(text)
    with pytest.raises(UnsupportedError, match="not a PCI address"):
        as_bdf(text)


def test_gpus_are_found_by_any_name():
    original = machine("dgx-h100")
    uuid = {"uuid": "GPU-8f2a6f0c-1111-2222-3333-444455556666"}
    gpus = [gpu.to_json() | (uuid if gpu.index == 2 else {}) for gpu in original.gpus]
    whole = Machine.from_json(original.to_json() | {"gpus": gpus})
    third = whole.gpus[2]
    for key in (2, third.bdf, f"0000{third.bdf}".upper(), third.uuid, "GPU-8f2a"):
        assert key is not None
        assert whole.gpu(key) is third
    for key in (8, "0000:99:00.0", "GPU-", "GPU-9"):
        with pytest.raises(UnsupportedError, match="no GPU is"):
            whole.gpu(key)
