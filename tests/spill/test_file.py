"""Spill files on real drives: what goes in comes out, and nothing else ever does."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorspill.errors import (
    BrokenError,
    BusyError,
    CapacityError,
    ClosedError,
    CorruptError,
    EndOfFileError,
    MissingNameError,
    NoSpaceError,
    SpillError,
    UnsupportedError,
)
from tensorspill.pool import BufferPool
from tensorspill.spill.file import SpillFile
from tests.conformance.data import random_bytes
from tests.faults.file_systems import small_file_system
from tests.faults.limits import file_size_limit
from tests.spill.helpers import check_spill, compile_kernels, storm

BLOCK = 4096
MIB = 1 << 20

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint16,
]


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    compile_kernels()


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[SpillFile]:
    with SpillFile(tmp_path / "place") as file:
        yield file
        check_spill(file)


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return a tensor of fresh random bytes."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes > 4 * MIB:
        # Faster, and still no two rows alike.
        rows = torch.arange(-(-nbytes // MIB), dtype=torch.uint8)[:, None]
        flat = (rows + random_bytes(MIB)).reshape(-1)[:nbytes]
    else:
        flat = random_bytes(nbytes, 64).clone()
    found: torch.Tensor = flat.view(dtype).view(shape)
    return found


def empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a poisoned destination for a tensor."""
    return (
        torch.full((tensor.nbytes,), 0xA5, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    )


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def fetch(spill: SpillFile, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    destinations = {name: empty(tensor) for name, tensor in like.items()}
    spill.get(destinations).result()
    return destinations


def holds(spill: SpillFile, expected: dict[str, torch.Tensor]) -> bool:
    """Whether a spill file has exactly these tensors."""
    if set(spill) != set(expected):
        return False
    got = fetch(spill, expected)
    return all(raw(got[name]) == raw(tensor) for name, tensor in expected.items())


# -- the dictionary ------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("folders", [1, 3])
def test_every_dtype_shape_and_address(tmp_path: Path, folders: int, verify: bool) -> None:
    places = [tmp_path / f"drive{i}" for i in range(folders)]
    tensors = {str(dtype): filled((7, 5, 3), dtype) for dtype in DTYPES}
    tensors |= {f"empty {shape}": torch.empty(shape) for shape in [(0,), (3, 0, 2)]}
    tensors |= {
        "scalar": filled((), torch.float32),
        "": filled((1,)),
        "name/with/../odd": filled((9,)),
    }
    tensors |= {
        f"at {shift}, {nbytes}": random_bytes(nbytes, shift)
        for shift in (0, 1, 64, 511, 512)
        for nbytes in (1, 511, BLOCK, BLOCK + 1, 200_000, 3 * MIB + 77)
    }
    with SpillFile(places, verify=verify) as spill:
        spill.put(tensors).result()
        assert holds(spill, tensors)
        check_spill(spill)
        changed = {name: filled(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        spill.put(changed).result()
        assert holds(spill, changed)
        check_spill(spill)


def test_names_sizes_and_meta(spill: SpillFile) -> None:
    tensors = {"a": filled((3, 5), torch.bfloat16), "b": torch.empty(0)}
    assert len(spill) == 0
    assert "a" not in spill
    spill.put(tensors).result()
    assert list(spill) == ["a", "b"]
    assert len(spill) == 2
    assert "a" in spill
    assert 7 not in spill
    assert spill.size_of("a") == 30
    meta = spill.meta("a")
    assert (meta.name, meta.shape, meta.dtype, meta.nbytes) == ("a", (3, 5), torch.bfloat16, 30)
    assert not meta.torn
    assert spill.location("b") == ()
    spill.delete("a")
    assert "a" not in spill
    for question in (spill.size_of, spill.meta, spill.location, spill.delete):
        with pytest.raises(MissingNameError, match="'a'"):
            question("a")


def test_location_is_where_the_bytes_are(tmp_path: Path) -> None:
    with SpillFile([tmp_path / "x", tmp_path / "y"], block_bytes=64 * 1024) as spill:
        tensors = {"small": filled((1000,)), "large": random_bytes(3 * MIB + 5, 64)}
        spill.put(tensors).result()
        for name, tensor in tensors.items():
            found = b""
            for location in spill.location(name):
                assert location.path in spill.paths
                with open(location.path, "rb") as file:
                    file.seek(location.offset)
                    found += file.read(location.nbytes)
            assert found == raw(tensor)
        assert len(spill.location("large")) == 2


def test_other_shapes_of_the_same_number_of_elements(spill: SpillFile) -> None:
    tensor = filled((4, 6), torch.float32)
    spill.put({"a": tensor}).result()
    flat = torch.empty(24)
    assert spill.get({"a": flat}).result().nbytes == 96
    assert raw(flat) == raw(tensor)


def test_parameters_and_buffers(spill: SpillFile) -> None:
    parameter = torch.nn.Parameter(torch.randn(1000))
    with BufferPool(MIB) as pool, pool.allocate(1000, torch.float32) as buffer:
        spill.put({"a": parameter}).result()
        spill.get({"a": buffer}).result()
        assert raw(buffer.tensor) == raw(parameter)
        buffer.tensor.fill_(3)
        spill.put({"b": buffer}).result()
        spill.get({"b": parameter}).result()
        assert bool((parameter == 3).all())
        buffer.release()
        with pytest.raises(ClosedError):
            spill.put({"c": buffer})


def test_order_of_calls_counts_not_the_order_of_ends(spill: SpillFile) -> None:
    large = {"large": filled((8 * MIB,))}
    for _ in range(5):
        versions = [filled((100_000,)) for _ in range(4)]
        seen = [empty(versions[0]) for _ in versions]
        transfers = [spill.put(large)]
        for version, destination in zip(versions, seen, strict=True):
            transfers += [spill.put({"a": version}), spill.get({"a": destination})]
        spill.delete("a")
        assert "a" not in spill
        for transfer in transfers:
            transfer.result()
        assert list(map(raw, seen)) == list(map(raw, versions))
    check_spill(spill)


def test_names_count_as_soon_as_they_are_put(spill: SpillFile) -> None:
    transfer = spill.put({"a": filled((8 * MIB,)), "b": filled((1,))})
    assert len(spill) == 2
    assert set(spill) == {"a", "b"}
    assert spill.size_of("a") == 8 * MIB
    transfer.result()


def test_an_empty_batch(spill: SpillFile) -> None:
    assert spill.put({}).result().nbytes == 0
    assert spill.get({}).result().nbytes == 0
    assert spill.put({"a": torch.empty(0)}).result().nbytes == 0


# -- bad input -----------------------------------------------------------------------------------


def bad_tensors() -> dict[str, Any]:
    freed = torch.empty(10)
    freed.untyped_storage().resize_(0)
    return {
        "a list": [1, 2],
        "None": None,
        "an array": torch.empty(3).numpy(),
        "not contiguous": torch.empty(4, 4).t(),
        "expanded": torch.empty(1).expand(4),
        "on another device": torch.empty(4, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "a lazy conjugate": torch.zeros(4, dtype=torch.complex64).conj(),
        "a lazy negative": torch.zeros(1, dtype=torch.complex64).conj().imag,
        "without memory": freed,
    }


@pytest.mark.parametrize("what", list(bad_tensors()))
def test_bad_tensors_change_nothing(spill: SpillFile, what: str) -> None:
    old = {"a": filled((100,)), "b": filled((10,))}
    spill.put(old).result()
    before = spill.statistics()
    for operation in (spill.put, spill.get):
        with pytest.raises(UnsupportedError, match="'b'"):
            operation({"a": filled((100,)), "b": bad_tensors()[what]})
    assert spill.statistics() == before
    assert holds(spill, old)


def test_bad_names_and_mappings(spill: SpillFile) -> None:
    for bad in ({3: torch.empty(1)}, [("a", torch.empty(1))], torch.empty(1)):
        with pytest.raises(UnsupportedError):
            spill.put(bad)  # type: ignore[arg-type]
    assert len(spill) == 0


def test_bad_destinations_change_nothing(spill: SpillFile) -> None:
    old = {"a": filled((100,), torch.float32), "b": filled((10,))}
    spill.put(old).result()
    good = torch.zeros(100)
    for bad in (
        torch.empty(99),
        torch.empty(100, dtype=torch.int32),
        torch.empty(200, dtype=torch.bfloat16),
    ):
        with pytest.raises(UnsupportedError, match="'a'"):
            spill.get({"b": torch.empty(10, dtype=torch.uint8), "a": bad})
    with pytest.raises(MissingNameError, match="'c'"):
        spill.get({"a": good, "c": good})
    assert not good.any()
    check_spill(spill)


@pytest.mark.parametrize("folders", [1, 2])
def test_overlapping_destinations(tmp_path: Path, folders: int) -> None:
    with SpillFile([tmp_path / str(i) for i in range(folders)]) as spill:
        spill.put({"a": filled((100,)), "b": filled((100,))}).result()
        memory = torch.zeros(150, dtype=torch.uint8)
        with pytest.raises(UnsupportedError, match="overlap"):
            spill.get({"a": memory[:100], "b": memory[50:]})
        assert not memory.any()
        check_spill(spill)
        spill.put({"c": memory[:100], "d": memory[50:]}).result()


def test_bad_arguments(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    cases: list[tuple[dict[str, Any], type[SpillError]]] = [
        ({"folder": []}, UnsupportedError),
        ({"folder": [tmp_path / "x", tmp_path / "y" / ".." / "x"]}, UnsupportedError),
        ({"folder": tmp_path / "link"}, UnsupportedError),
        ({"folder": tmp_path / "x", "capacity": "much"}, UnsupportedError),
        ({"folder": tmp_path / "x", "capacity": -1}, UnsupportedError),
        ({"folder": tmp_path / "x", "backend": "paper"}, UnsupportedError),
        ({"folder": tmp_path / "x", "device": "meta"}, UnsupportedError),
        ({"folder": tmp_path / "x", "colour": "red"}, UnsupportedError),
        ({"folder": tmp_path / "x", "depth": 0}, UnsupportedError),
        ({"folder": [tmp_path / "x", "/proc/nowhere"]}, BrokenError),
        ({"folder": tmp_path / "x", "capacity": "1000000TiB"}, BrokenError),
    ]
    for arguments, kind in cases:
        with pytest.raises(kind):
            SpillFile(**arguments)
        assert not list(tmp_path.rglob("*.spill")), arguments


# -- room ----------------------------------------------------------------------------------------


def test_capacity_is_in_whole_blocks(tmp_path: Path) -> None:
    with SpillFile(tmp_path, capacity="40KiB") as spill:
        spill.put({str(i): filled((1,)) for i in range(9)}).result()
        with pytest.raises(CapacityError) as caught:
            spill.put({"x": filled((BLOCK,)), "y": filled((1,))})
        error = caught.value
        assert (error.asked, error.free, error.largest) == (2 * BLOCK, BLOCK, BLOCK)
        assert "x" not in spill
        check_spill(spill)
        spill.put({"x": filled((BLOCK,))}).result()
        assert spill.statistics().free == 0
        spill.put({"nothing": torch.empty(0)}).result()
        spill.delete("0")
        spill.put({"y": filled((1,))}).result()
        check_spill(spill)


def test_capacity_can_be_used_up_whatever_the_order(tmp_path: Path) -> None:
    with SpillFile(tmp_path, capacity=64 * BLOCK) as spill:
        tensors = {str(i): filled((BLOCK,)) for i in range(64)}
        spill.put(tensors).result()
        for i in range(0, 64, 2):
            spill.delete(str(i))
        kept = {name: tensor for name, tensor in tensors.items() if name in spill}
        kept["large"] = filled((32 * BLOCK,))
        spill.put({"large": kept["large"]}).result()
        assert len(spill.location("large")) == 32
        assert holds(spill, kept)
        check_spill(spill)


def test_without_room_for_two_the_old_one_is_overwritten(tmp_path: Path) -> None:
    with SpillFile(tmp_path, capacity=10 * BLOCK) as spill:
        old = {"a": filled((8 * BLOCK,))}
        spill.put(old).result()
        new = {"a": filled((8 * BLOCK,)), "b": filled((BLOCK,))}
        destination = empty(old["a"])
        reading = spill.get({"a": destination})
        spill.put(new).result()
        assert raw(destination) == raw(old["a"]), "the reader came first"
        assert reading.done()
        assert spill.statistics().in_place == 1
        assert holds(spill, new)
        with pytest.raises(CapacityError):
            spill.put({"a": filled((9 * BLOCK,))})
        assert holds(spill, new)
        shorter = new | {"a": filled((5,))}
        spill.put({"a": shorter["a"]}).result()
        assert holds(spill, shorter)
        check_spill(spill)


def test_room_that_comes_free_is_waited_for(tmp_path: Path) -> None:
    with SpillFile(tmp_path, capacity=16 * MIB) as spill:
        for _ in range(4):
            first, second = filled((12 * MIB,)), filled((12 * MIB,))
            spill.put({"a": first}).result()
            destination = empty(first)
            reading = spill.get({"a": destination})
            spill.delete("a")
            spill.put({"b": second}).result()
            assert reading.done()
            assert raw(destination) == raw(first)
            assert holds(spill, {"b": second})
            spill.delete("b")


def test_growth(spill: SpillFile) -> None:
    tensors = {}
    for i in range(4):
        tensors[str(i)] = filled((30 * MIB,))
        spill.put({str(i): tensors[str(i)]}).result()
    assert spill.statistics().growths >= 2
    assert spill.statistics().capacity >= 120 * MIB
    assert os.stat(spill.paths[0]).st_size >= 120 * MIB
    assert holds(spill, tensors)


def test_room_is_used_again(spill: SpillFile) -> None:
    for i in range(30):
        spill.put({"a": filled((3 * MIB + i * BLOCK,)), "b": filled((17,))}).result()
    assert spill.statistics().capacity <= 80 * MIB
    check_spill(spill)


def test_reserved_room(tmp_path: Path) -> None:
    with SpillFile(tmp_path, capacity=10 * BLOCK) as spill:
        spill.reserve({"a": 4 * BLOCK, "b": 3 * BLOCK})
        assert "a" not in spill
        assert len(spill) == 0
        with pytest.raises(CapacityError):
            spill.reserve({"c": 2 * BLOCK, "d": 2 * BLOCK})
        with pytest.raises(CapacityError):
            spill.put({"c": filled((4 * BLOCK,))})
        check_spill(spill)
        a = filled((4 * BLOCK,))
        spill.put({"a": a}).result()
        assert spill.statistics().free == 3 * BLOCK
        spill.reserve({"a": BLOCK, "b": BLOCK})
        assert spill.statistics().free == 3 * BLOCK
        spill.delete("b")
        assert spill.statistics().free == 6 * BLOCK
        assert holds(spill, {"a": a})


# -- failures ------------------------------------------------------------------------------------


def test_failed_put_leaves_the_old_tensors(spill: SpillFile) -> None:
    old = {"a": filled((300_000,)), "b": filled((10,))}
    spill.put(old).result()
    with file_size_limit(BLOCK):
        transfer = spill.put({"a": filled((300_000,)), "b": filled((20,)), "c": filled((9,))})
        with pytest.raises(NoSpaceError) as caught:
            transfer.result()
        assert caught.value.path == spill.paths[0]
    assert holds(spill, old)
    assert spill.statistics().failures == 1
    check_spill(spill)
    spill.put(old | {"c": filled((9,))}).result()


def test_failed_overwrite_tears_the_tensor(tmp_path: Path) -> None:
    with SpillFile(tmp_path, capacity=64 * BLOCK) as spill:
        spill.put({"b": filled((2 * BLOCK,))}).result()
        spill.put({"a": filled((60 * BLOCK,))}).result()
        with file_size_limit(2 * BLOCK):
            transfer = spill.put({"a": filled((60 * BLOCK,))})
            with pytest.raises(NoSpaceError):
                transfer.result()
        assert spill.meta("a").torn
        assert "a" in spill
        destination = torch.zeros(60 * BLOCK, dtype=torch.uint8)
        with pytest.raises(BrokenError, match="torn"):
            spill.get({"a": destination, "b": filled((2 * BLOCK,))})
        assert not destination.any()
        check_spill(spill)
        good = filled((60 * BLOCK,))
        spill.put({"a": good}).result()
        spill.delete("b")
        assert holds(spill, {"a": good})


def test_file_truncated_behind_our_back(spill: SpillFile) -> None:
    tensors = {"a": filled((2 * BLOCK,)), "b": filled((2 * MIB,))}
    spill.put({"a": tensors["a"]}).result()
    spill.put({"b": tensors["b"]}).result()
    length = os.stat(spill.paths[0]).st_size
    os.truncate(spill.paths[0], 4 * BLOCK)
    with pytest.raises(EndOfFileError) as caught:
        fetch(spill, tensors)
    assert caught.value.path == spill.paths[0]
    assert raw(fetch(spill, {"a": tensors["a"]})["a"]) == raw(tensors["a"])
    spill.put({"b": tensors["b"]}).result()
    assert holds(spill, tensors)
    os.truncate(spill.paths[0], length)


def test_file_removed_behind_our_back(spill: SpillFile) -> None:
    tensors = {"a": filled((2 * BLOCK,))}
    spill.put(tensors).result()
    os.unlink(spill.paths[0])
    assert holds(spill, tensors)
    with pytest.raises(BrokenError):
        spill.put({"b": filled((200 * MIB,))})
    assert holds(spill, tensors)


@pytest.mark.parametrize("capacity", [None, 20 * MIB])
def test_full_disk(tmp_path: Path, capacity: int | None) -> None:
    with small_file_system(tmp_path, 24 * MIB) as place:
        if capacity is not None:
            with pytest.raises(NoSpaceError) as refused:
                SpillFile(place, capacity=2 * capacity)
            assert refused.value.free is not None
            assert not list(place.rglob("*.spill"))
        with SpillFile(place, capacity=capacity) as spill:
            tensors = {str(i): filled((MIB,)) for i in range(8)}
            spill.put(tensors).result()
            with pytest.raises(CapacityError) as caught:
                spill.put({f"more {i}": filled((MIB,)) for i in range(40)})
            assert isinstance(caught.value, NoSpaceError) == (capacity is None)
            assert holds(spill, tensors)
            check_spill(spill)
            while True:
                name = f"more {len(tensors)}"
                tensor = filled((MIB,))
                try:
                    spill.put({name: tensor}).result()
                except CapacityError:
                    break
                tensors[name] = tensor
            assert holds(spill, tensors)
            tensors = {name: filled((MIB,)) for name in tensors}
            spill.put(tensors).result()
            assert spill.statistics().in_place > 0
            assert holds(spill, tensors)
            for name in list(tensors)[::2]:
                spill.delete(name)
                del tensors[name]
            tensors["new"] = filled((3 * MIB,))
            spill.put({"new": tensors["new"]}).result()
            assert holds(spill, tensors)
            check_spill(spill)


def test_corrupt_bytes_are_named(tmp_path: Path) -> None:
    tensors = {f"tensor {i}": filled((300_000 + i,)) for i in range(4)}
    tensors["none"] = torch.empty(0)
    with SpillFile(tmp_path, verify=True) as spill:
        spill.put(tensors).result()
        assert spill.meta("none").digest is not None
        where = spill.location("tensor 2")[0]
        with open(where.path, "r+b") as file:
            file.seek(where.offset + 1234)
            byte = file.read(1)
            file.seek(where.offset + 1234)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(CorruptError, match="'tensor 2'") as caught:
            fetch(spill, tensors)
        assert caught.value.names == ("tensor 2",)
        assert "tensor 1" not in str(caught.value)
        del tensors["tensor 2"]
        fetch(spill, tensors)
        tensors["tensor 2"] = filled((5,))
        spill.put({"tensor 2": tensors["tensor 2"]}).result()
        assert holds(spill, tensors)
        check_spill(spill)


def test_buffers_are_kept_while_they_are_checked(tmp_path: Path) -> None:
    with SpillFile(tmp_path, verify=True) as spill, BufferPool(64 * MIB) as pool:
        buffer = pool.allocate(48 * MIB)
        buffer.tensor.copy_(filled((48 * MIB,)))
        for operation in (spill.put, spill.get):
            transfer = operation({"a": buffer})
            released = False
            while not transfer.done():
                try:
                    buffer.release()
                    released = True
                except BusyError:
                    pass
            if released:
                assert transfer.done()
                buffer = pool.allocate(48 * MIB)
            assert transfer.exception() is None
        buffer.release()


def test_cancelled_put_leaves_the_old_tensor(spill: SpillFile) -> None:
    old = {"a": filled((64 * MIB,))}
    spill.put(old).result()
    new = {"a": filled((64 * MIB,))}
    transfer = spill.put(new)
    transfer.cancel()
    try:
        transfer.result()
    except CancelledError:
        assert holds(spill, old)
    else:
        assert holds(spill, new)
    check_spill(spill)


# -- lifetimes -----------------------------------------------------------------------------------


def test_closed(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path)
    tensor = filled((30 * MIB,))
    transfer = spill.put({"a": tensor})
    spill.close()
    assert transfer.done()
    assert transfer.exception() is None
    spill.close()
    assert spill.closed
    assert not list(tmp_path.rglob("*.spill"))
    operations: list[Any] = [
        lambda: spill.put({"a": tensor}),
        lambda: spill.get({"a": tensor}),
        lambda: spill.delete("a"),
        lambda: spill.reserve({"b": 1}),
        lambda: len(spill),
        lambda: list(spill),
        lambda: "a" in spill,
        lambda: spill.size_of("a"),
        lambda: spill.meta("a"),
        lambda: spill.location("a"),
    ]
    for operation in operations:
        with pytest.raises(ClosedError):
            operation()
    assert spill.statistics().engines[0].bytes_written == 30 * MIB
    assert "closed" in repr(spill)


def test_dropped_without_close(tmp_path: Path) -> None:
    for _ in range(3):
        spill = SpillFile(tmp_path, verify=True)
        tensor, destination = filled((20 * MIB,)), torch.empty(20 * MIB, dtype=torch.uint8)
        spill.put({"a": tensor}).result()
        transfer = spill.get({"a": destination})
        del spill
        gc.collect()
        assert not list(tmp_path.rglob("*.spill"))
        transfer.result()
        assert raw(destination) == raw(tensor)


def test_nothing_is_lost_over_many(tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for i in range(12):
        with SpillFile([tmp_path / "x", tmp_path / "y"], verify=True) as spill:
            spill.put({"a": filled((100,))}).result()
        if i == 2:
            before = count()
    assert count() == before


def test_two_on_one_folder(tmp_path: Path) -> None:
    with SpillFile(tmp_path) as first, SpillFile(tmp_path) as second:
        a, b = {"x": filled((5000,))}, {"x": filled((5000,))}
        first.put(a).result()
        second.put(b).result()
        assert first.paths != second.paths
        assert holds(first, a)
        first.close()
        assert holds(second, b)


def test_forked_child(tmp_path: Path) -> None:
    with SpillFile(tmp_path) as spill:
        tensors = {"a": filled((5000,))}
        spill.put(tensors).result()
        running = spill.put({"b": filled((20 * MIB,))})
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for operation in (lambda: spill.put({}), lambda: len(spill)):
                    try:
                        operation()
                    except ClosedError as error:
                        code = 0 if "parent" in str(error) else 2
                spill.close()
                spill.statistics()
                del spill
                gc.collect()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        running.result()
        spill.delete("b")
        assert holds(spill, tensors)
        assert os.path.exists(spill.paths[0])


KILLED = """
import sys, torch
from tensorspill.spill.file import SpillFile
spill = SpillFile(sys.argv[1])
spill.put({"a": torch.zeros(1 << 20)}).result()
print(spill.paths[0], flush=True)
while True:
    spill.put({"a": torch.zeros(1 << 22)})
"""


def test_killed_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    with SpillFile(tmp_path) as spill:
        assert os.path.exists(path)
        assert path not in spill.paths
    process.kill()
    process.communicate()
    assert os.path.exists(path)
    with SpillFile(tmp_path):
        assert not os.path.exists(path)


LEAVING = """
import sys, torch
from tensorspill.spill.file import SpillFile
spill = SpillFile(sys.argv[1], verify=True)
transfers = [spill.put({str(i): torch.zeros(1 << 20)}) for i in range(8)]
transfers.append(spill.get({"0": torch.zeros(1 << 20)}))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.thorough), 3])
def test_interpreter_ends_with_transfers_under_way(tmp_path: Path, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVING, str(tmp_path), str(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    assert not list(tmp_path.rglob("*.spill"))


# -- threads and interrupts ----------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, 24 * BLOCK])
def test_threads(tmp_path: Path, capacity: int | None) -> None:
    """Each thread has names of its own, and all share one whose value is never mixed."""
    failures: list[BaseException] = []

    def work(number: int, spill: SpillFile) -> None:
        try:
            for i in range(25):
                own = {f"{number}": filled((3 * BLOCK,))}
                spill.put({"shared": torch.full((2 * BLOCK,), number * 25 + i, dtype=torch.uint8)})
                spill.put(own)
                seen = torch.zeros(2 * BLOCK, dtype=torch.uint8)
                mine = empty(own[f"{number}"])
                spill.get({"shared": seen, f"{number}": mine}).result()
                assert raw(mine) == raw(own[f"{number}"])
                assert seen.unique().numel() == 1
                spill.delete(f"{number}")
        except BaseException as error:
            failures.append(error)

    with SpillFile(tmp_path, capacity=capacity, verify=True) as spill:
        threads = [threading.Thread(target=work, args=(i, spill)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert list(spill) == ["shared"]
        check_spill(spill)


def put_until_closed(spill: SpillFile, name: str, failures: list[BaseException]) -> None:
    try:
        while True:
            spill.put({name: filled((20 * BLOCK,))})
    except ClosedError:
        pass
    except BaseException as error:
        failures.append(error)


def test_close_in_one_thread_while_others_work(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    for _ in range(3):
        spill = SpillFile(tmp_path, capacity=64 * BLOCK)
        threads = [
            threading.Thread(target=put_until_closed, args=(spill, str(i), failures))
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        spill.close()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("verify", [False, True])
def test_interrupts_leave_every_put_done_or_undone(tmp_path: Path, verify: bool) -> None:
    """A storm of Ctrl-C, at any line of a put, get or delete."""
    nbytes = 15 * BLOCK
    possible: dict[str, set[int | None]] = {name: {None} for name in "abc"}
    interrupts = 0
    with SpillFile(tmp_path, capacity=64 * BLOCK, verify=verify) as spill, storm(0.0004) as armed:
        for i in range(300):
            name, value = "abc"[i % 3], i % 251
            tensor = torch.full((nbytes,), value, dtype=torch.uint8)
            destination = torch.zeros(nbytes, dtype=torch.uint8)
            reading = None
            try:
                armed[0] = True
                if i % 7 == 6:
                    possible[name].add(None)
                    spill.delete(name)
                    possible[name] = {None}
                else:
                    possible[name].add(value)
                    spill.put({name: tensor}).result()
                    possible[name] = {value}
                    reading = spill.get({name: destination})
                    reading.result()
                    armed[0] = False
                    assert bool((destination == value).all())
            except (KeyboardInterrupt, CancelledError):
                interrupts += 1
            except MissingNameError:
                assert i % 7 == 6
                assert None in possible[name]
            armed[0] = False
        for name, values in possible.items():
            if name not in spill:
                assert None in values
            elif not spill.meta(name).torn:
                destination = torch.zeros(nbytes, dtype=torch.uint8)
                spill.get({name: destination}).result()
                (value,) = destination.unique().tolist()
                assert value in values
        check_spill(spill)
    assert interrupts > 20


def test_statistics(spill: SpillFile) -> None:
    tensors = {"a": filled((100_000,)), "b": filled((10,))}
    spill.put(tensors).result()
    fetch(spill, tensors)
    spill.delete("b")
    statistics = spill.statistics()
    assert (statistics.puts, statistics.gets, statistics.deletes) == (1, 1, 1)
    assert (statistics.names, statistics.stored_bytes) == (1, 100_000)
    assert statistics.free == statistics.capacity - 25 * BLOCK
    (engine,) = statistics.engines
    assert engine.bytes_written == engine.bytes_read == 100_010
    with pytest.raises(AttributeError):
        statistics.names = 3  # type: ignore[misc]


def test_a_drive_of_its_own_gets_large_tensors_at_their_residue(tmp_path: Path) -> None:
    """There they move without a copy; on a hypervisor's drives copying is faster."""
    with (
        small_file_system(tmp_path, 32 << 20) as folder,
        SpillFile(folder, capacity="16MiB") as spill,
    ):
        raw = torch.randint(0, 256, ((2 << 20) + 4096,), dtype=torch.uint8)
        start = (64 - raw.data_ptr()) % 512
        tensor = raw[start : start + (2 << 20)]
        record = spill.put({"w": tensor}).result()
        (place,) = spill.location("w")
        assert place.offset % 512 == 64
        assert set(record.by_path) == {"direct", "edge"}
        back = torch.zeros_like(tensor)
        spill.get({"w": back}).result()
        assert torch.equal(back, tensor)
