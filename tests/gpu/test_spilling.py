"""Spill files and the swapper with tensors on a GPU, on the host path: checked end to end."""

import contextlib
import threading

import pytest
import torch

from tensorspill import ParameterSwapper, SpillFile, SwapStatus
from tensorspill.errors import CorruptError

pytestmark = pytest.mark.gpu


def fresh(nbytes):
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")


@contextlib.contextmanager
def opened(tmp_path, **options):
    with SpillFile(tmp_path, device="cuda", backend="aio", **options) as spill:
        yield spill


def flip(where, at):
    with open(where.path, "r+b") as file:
        file.seek(where.offset + at)
        byte = file.read(1)[0]
        file.seek(where.offset + at)
        file.write(bytes([byte ^ 0x04]))


@pytest.mark.parametrize("verify", [False, True])
def test_there_and_back(tmp_path, verify):
    tensors = {str(n): fresh(n) for n in (1, 511, 4096, 70_001, 9 << 20)}
    tensors["half"] = torch.randn(1000, 7, device="cuda").bfloat16()
    back = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with opened(tmp_path, verify=verify) as spill:
        spill.put(tensors).result()
        spill.get(back).result()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_a_flipped_bit_is_found_and_named(tmp_path):
    tensors = {"one": fresh(100_000), "two": fresh(300_001), "three": fresh(5)}
    back = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with opened(tmp_path, verify=True) as spill:
        spill.put(tensors).result()
        flip(spill.location("two")[0], 299_999)
        with pytest.raises(CorruptError, match="'two'") as caught:
            spill.get(back).result()
        assert caught.value.names == ("two",)
        del back["two"]
        spill.get(back).result()
        spill.put({"two": tensors["two"]}).result()
        spill.get({"two": torch.empty_like(tensors["two"])}).result()


def test_what_is_queued_on_the_stream_is_written(tmp_path):
    memory = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
    back = torch.empty_like(memory)
    with opened(tmp_path, verify=True) as spill:
        for turn in range(5):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(30):
                    memory.add_(1)
                spill.put({"x": memory}).result()
                spill.get({"x": back}).result()
                assert bool((back == 30 * (turn + 1)).all())
            torch.cuda.synchronize()


def test_threads_with_streams_of_their_own(tmp_path):
    wrong: list[object] = []

    def work(spill, index):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(10):
                    tensor = torch.zeros(1_000_003, dtype=torch.uint8, device="cuda")
                    for _ in range(20):
                        tensor.add_(1)
                    tensor.add_(turn + index)
                    spill.put({str(index): tensor}).result()
                    tensor.fill_(0xA5)
                    spill.get({str(index): tensor}).result()
                    if not bool((tensor == 20 + turn + index).all()):
                        wrong.append((index, turn))
        except Exception as error:
            wrong.append((index, error))

    with opened(tmp_path, verify=True) as spill:
        threads = [threading.Thread(target=work, args=(spill, index)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_the_swapper_casts_and_writes(tmp_path):
    with ParameterSwapper(
        tmp_path, torch.bfloat16, "8MiB", device="cuda", backend="aio", verify=True
    ) as swapper:
        params = [torch.nn.Parameter(fresh(200_000).bfloat16()) for _ in range(30)]
        swapper.swap_out(params)
        assert {swapper.status(p) for p in params} == {SwapStatus.NOT_AVAILABLE}
        masters = [torch.randn(200_000, device="cuda") for _ in params]
        swapper.cast_and_write(params, masters)
        for param, master in zip(params, masters, strict=True):
            swapper.swap_in([param], wait=True)
            assert torch.equal(param.data, master.bfloat16())
            swapper.release([param])
