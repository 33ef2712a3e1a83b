"""DeepSpeed's handle on this library's engines."""

import errno
import gc
import itertools
import os
import resource
from pathlib import Path

import pytest
import torch

from tensorspill.deepspeed import AioHandle, GdsHandle
from tensorspill.errors import (
    BrokenError,
    CorruptError,
    EndOfFileError,
    MissingFileError,
    NoSpaceError,
    UnsupportedError,
)
from tests.deepspeed_interface.helpers import fresh
from tests.faults import descriptors, resource_limit, small_file_system


@pytest.fixture
def handle() -> AioHandle:
    return AioHandle(block_size=8192, queue_depth=4, intra_op_parallelism=2)


def test_what_it_was_made_with() -> None:
    handle = AioHandle(1000, 7, True, True, 3)
    assert handle.get_block_size() == 1000
    assert handle.get_queue_depth() == 7
    assert handle.get_single_submit()
    assert handle.get_overlap_events()
    assert handle.get_intra_op_parallelism() == 3
    assert handle.get_alignment() == 3 * 512
    for wrong in ((0,), (1 << 20, 0), (1 << 20, 8, False, False, 0)):
        with pytest.raises(UnsupportedError):
            AioHandle(*wrong)


@pytest.mark.parametrize("nbytes", [1, 511, 4096, 100_003])
def test_sizes_need_no_alignment(handle: AioHandle, tmp_path: Path, nbytes: int) -> None:
    """Seen: a length that is no multiple of 512 left a file of 0 bytes, and wait() said 1."""
    path, data = str(tmp_path / "a"), fresh(nbytes)
    assert handle.async_pwrite(data, path) == 0
    assert handle.wait() == 1
    assert Path(path).read_bytes() == data.numpy().tobytes()
    back = torch.full_like(data, 0xFF)
    assert handle.sync_pread(back, path) == 1
    assert torch.equal(back, data)


def test_operations_are_counted_together(handle: AioHandle, tmp_path: Path) -> None:
    parts = [fresh(5000, seed) for seed in range(5)]
    for i, part in enumerate(parts):
        handle.async_pwrite(part, str(tmp_path / f"{i}"))
    assert handle.wait() == 5
    assert handle.wait() == 0
    back = [torch.zeros_like(part) for part in parts]
    for i, part in enumerate(back[:-1]):
        handle.async_pread(part, str(tmp_path / f"{i}"))
    assert handle.sync_pread(back[-1], str(tmp_path / "4")) == 5
    assert all(map(torch.equal, back, parts))


def test_offsets(handle: AioHandle, tmp_path: Path) -> None:
    path, data = str(tmp_path / "a"), fresh(30_000)
    cuts = [0, 1000, 4096, 13_001, 30_000]
    for begin, end in itertools.pairwise(cuts):
        handle.sync_pwrite(data[begin:end], path, begin)
    assert Path(path).read_bytes() == data.numpy().tobytes()
    back = torch.zeros(5000, dtype=torch.uint8)
    handle.sync_pread(back, path, 7001)
    assert torch.equal(back, data[7001:12_001])


def test_a_descriptor_in_place_of_a_name(handle: AioHandle, tmp_path: Path) -> None:
    path, data = tmp_path / "a", fresh(8192)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        assert handle.async_pwrite(buffer=data, fd=fd, file_offset=100) == 0
        assert handle.wait() == 1
        path.rename(tmp_path / "b")
        assert handle.async_pwrite(data[:50], fd, 0) == 0
        assert handle.wait() == 1
        os.unlink(tmp_path / "b")
        with pytest.raises(UnsupportedError, match="can be opened again"):
            handle.async_pwrite(data, fd)
    finally:
        os.close(fd)


def test_dtypes_shapes_and_strides(handle: AioHandle, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    for tensor in (
        torch.randn(3, 5, 7),
        torch.randn(100).bfloat16(),
        torch.tensor(4.5),
        torch.randn(40, 30)[:, 3:17],
        torch.nn.Parameter(torch.randn(9)),
    ):
        handle.sync_pwrite(tensor, path)
        back = torch.zeros_like(tensor)
        handle.sync_pread(back, path)
        assert torch.equal(back, tensor)
    strided = torch.zeros(40, 30)[:, 3:17]
    handle.sync_pwrite(torch.arange(40 * 14.0), path)
    handle.sync_pread(strided, path)
    assert torch.equal(strided, torch.arange(40 * 14.0).view(40, 14))


def test_a_file_that_was_replaced_is_opened_again(handle: AioHandle, tmp_path: Path) -> None:
    path, first, second = tmp_path / "a", fresh(9000, 1), fresh(9000, 2)
    handle.sync_pwrite(first, str(path))
    path.unlink()
    handle.sync_pwrite(second, str(path))
    assert path.read_bytes() == second.numpy().tobytes()
    (tmp_path / "other").write_bytes(first.numpy().tobytes())
    (tmp_path / "other").rename(path)
    back = torch.zeros(9000, dtype=torch.uint8)
    handle.sync_pread(back, str(path))
    assert torch.equal(back, first)


def test_validation(handle: AioHandle, tmp_path: Path) -> None:
    path, data = str(tmp_path / "a"), fresh(9000)
    assert handle.pwrite(data, path, True, False) == 1
    assert handle.pread(torch.zeros_like(data), path, True, **{"async": True}) == 0
    assert handle.wait() == 1
    assert handle.write(data, path, True) == 0
    assert handle.read(torch.zeros_like(data), path, True) == 0
    changed = data.clone()
    handle.pwrite(changed, path, True, True)
    # The buffer belongs to the operation until wait: this is what validation is there to find.
    handle._batching.finish()
    changed[5000] ^= 1
    with pytest.raises(CorruptError):
        handle.wait()
    with pytest.raises(TypeError):
        handle.pread(data, path, True, sync=True)


# -- what DeepSpeed's own operator did not survive ----------------------------------------------


def test_a_short_file_raises(handle: AioHandle, tmp_path: Path) -> None:
    """Seen: the process is aborted."""
    (tmp_path / "a").write_bytes(b"x" * 5000)
    good = torch.zeros(5000, dtype=torch.uint8)
    handle.async_pread(torch.zeros(8192, dtype=torch.uint8), str(tmp_path / "a"))
    handle.async_pread(good, str(tmp_path / "a"))
    with pytest.raises(EndOfFileError):
        handle.wait()
    assert bytes(good) == b"x" * 5000
    assert handle.wait() == 0


def test_a_missing_file_raises(handle: AioHandle, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        handle.async_pread(torch.zeros(10), str(tmp_path / "none"))
    with pytest.raises(MissingFileError):
        handle.async_pwrite(torch.zeros(10), str(tmp_path / "none" / "a"))
    assert handle.wait() == 0


def test_a_full_disk_raises(tmp_path: Path) -> None:
    """Seen: asked for 32 MiB, the file has 8, wait() says 1."""
    with small_file_system(tmp_path, 8 << 20) as folder:
        handle = AioHandle()
        with pytest.raises(NoSpaceError) as caught:
            handle.async_pwrite(torch.zeros(32 << 20, dtype=torch.uint8), str(folder / "a"))
        assert caught.value.errno == errno.ENOSPC
        assert not list(folder.glob("a"))
        handle.sync_pwrite(fresh(1 << 20), str(folder / "b"))
        del handle
        gc.collect()


def test_no_permission_raises(handle: AioHandle, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(BrokenError):
        handle.async_pwrite(torch.zeros(10), str(tmp_path / "a"))


def test_dropping_a_handle_with_work_under_way(tmp_path: Path) -> None:
    """Seen: an assertion ends the process."""
    data = fresh(4 << 20)
    handle = AioHandle()
    handle.async_pwrite(data, str(tmp_path / "a"))
    del handle
    gc.collect()
    assert (tmp_path / "a").read_bytes() == data.numpy().tobytes()


@pytest.mark.parametrize("nbytes", [100, 8192])
def test_no_descriptor_is_left(tmp_path: Path, nbytes: int) -> None:
    before = descriptors()
    with resource_limit(resource.RLIMIT_NOFILE, before + 500):
        for turn in range(3):
            handle = AioHandle()
            for i in range(600):  # more than are kept open, or could be
                handle.async_pwrite(fresh(nbytes, i), str(tmp_path / f"{i}"))
            assert handle.wait() == 600
            back = torch.zeros(nbytes, dtype=torch.uint8)
            handle.sync_pread(back, str(tmp_path / "7"))
            assert torch.equal(back, fresh(nbytes, 7))
            del handle
            gc.collect()
            assert descriptors() == before, turn


# -- memory ------------------------------------------------------------------------------------


def test_locked_tensors_are_known_to_all_handles(handle: AioHandle) -> None:
    other = AioHandle()
    tensor = handle.new_cpu_locked_tensor(5000, torch.zeros(1, dtype=torch.bfloat16))
    assert tensor.dtype is torch.bfloat16
    assert tensor.data_ptr() % 4096 == 0
    assert not tensor.any()
    assert other.is_pinned(tensor)
    assert other.is_pinned(tensor[1000:2000])
    assert not other.is_pinned(torch.zeros(5000))
    assert other.free_cpu_locked_tensor(tensor)
    assert not handle.is_pinned(tensor)
    assert not handle.free_cpu_locked_tensor(tensor)
    tensor.fill_(1)  # still mapped: it is in use here
    with pytest.raises(UnsupportedError):
        handle.new_cpu_locked_tensor(-1, tensor)


def test_a_gds_handle_serves_host_memory_as_well(tmp_path: Path) -> None:
    handle, data = GdsHandle(), fresh(10_000)
    handle.sync_pwrite(data, str(tmp_path / "a"))
    assert not handle.pin_device_tensor(data)
    assert not handle.unpin_device_tensor(data)
    with pytest.raises(UnsupportedError, match="meta"):
        handle.async_pread(torch.zeros(10, device="meta"), str(tmp_path / "a"))
