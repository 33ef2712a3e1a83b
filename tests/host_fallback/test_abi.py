import pytest

from tensorspill.errors import UnsupportedError
from tensorspill.host_fallback.abi import EVENT, IOCB, system_calls


def test_structures_have_the_kernel_s_sizes():
    assert IOCB.itemsize == 64
    assert EVENT.itemsize == 32
    # Offsets from linux/aio_abi.h.
    fields = IOCB.fields
    assert fields is not None
    offsets = {name: fields[name][1] for name in ("opcode", "fd", "addr", "nbytes", "offset")}
    assert offsets == {"opcode": 16, "fd": 20, "addr": 24, "nbytes": 32, "offset": 40}


def test_architectures():
    assert system_calls("x86_64").io_submit == 209
    assert system_calls("aarch64").io_submit == 2
    with pytest.raises(UnsupportedError, match="riscv64"):
        system_calls("riscv64")
