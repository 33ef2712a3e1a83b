"""DeepSpeed's swapper of partitioned parameters, on this library's engines and pool."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tensorspill.deepspeed.files import Files
from tensorspill.deepspeed.pinned import pinned_tensors
from tensorspill.deepspeed.status import status_type
from tensorspill.engine import Engine, Request, Transfer, gather
from tensorspill.errors import BusyError, CapacityError, MissingNameError, UnsupportedError
from tensorspill.pool import Buffer, BufferPool, Slab
from tensorspill.pool.sizes import round_up

__all__ = ["AsyncPartitionedParameterSwapper"]

#: Below this, DeepSpeed keeps a partition in memory.
SMALLEST = 1 << 20
#: DeepSpeed rounds what is in a file up to this many bytes for each thread, and reads that much.
ROUNDING = 1024
PAGE = 4096


class AsyncPartitionedParameterSwapper:
    """Partitions of parameters that live in a file each, and visit a budget of memory.

    The methods, and what they do to a parameter, are DeepSpeed's. Buffers are cut from one pool of
    ``buffer_count * buffer_size`` elements, in the sizes of the partitions, so that small ones do
    not take a whole slot each. What fails raises, leaves the parameter as it was, and loses no
    buffer.

    Parameters
    ----------
    ds_config : object
        DeepSpeed's configuration: ``zero_config.offload_param`` (``nvme_path``, ``buffer_count``,
        ``buffer_size`` in elements) and ``aio_config``.
    model_dtype : torch.dtype
        Of all partitions.

    Raises
    ------
    SpillError
        The folder or the memory can't be had.

    Notes
    -----
    Files lie in ``<nvme_path>/zero_stage_3/<dtype>params/rank<r>``; what is there is overwritten by
    name and never removed.
    """

    def __init__(self, ds_config: Any, model_dtype: torch.dtype) -> None:
        offload, aio = ds_config.zero_config.offload_param, ds_config.aio_config
        self.dtype = model_dtype
        self.swap_folder = _folder(offload.nvme_path, model_dtype)
        self.use_gds = bool(aio["use_gds"])
        self.min_aio_bytes = max(SMALLEST, aio["block_size"])
        threads = aio["intra_op_parallelism"]
        self.numel_alignment = ROUNDING * threads // model_dtype.itemsize
        self.elements_per_buffer = int(offload.buffer_size)
        self.param_buffer_count = int(offload.buffer_count)
        self._device = torch.device("cuda" if self.use_gds else "cpu")
        self._files = Files(
            block_bytes=round_up(aio["block_size"], PAGE),
            depth=min(aio["queue_depth"], 64),
            threads=threads,
        )
        self._slot_bytes = round_up(self._aligned(self.elements_per_buffer) * self._itemsize, PAGE)
        self._pool = BufferPool(self._slot_bytes * self.param_buffer_count, self._device)
        if isinstance(self._pool.slab, Slab):
            pinned_tensors.adopt(self._pool.slab)
        self._paths: dict[Any, str] = {}
        self._numels: dict[Any, int] = {}
        self._buffers: dict[Any, Buffer] = {}
        self._writes: list[tuple[Transfer, list[Any]]] = []
        self._reads: list[tuple[Transfer, list[Any], Sequence[torch.Tensor]]] = []
        self._reserved: list[Buffer] = []
        self._casting: torch.Tensor | None = None
        self._nothing = torch.ones(1, dtype=torch.half)
        self._end = weakref.finalize(self, self._files.close)

    # -- questions -------------------------------------------------------------------------------

    def available_swap_in_buffers(self) -> int:
        """Return how many more partitions of the largest size there is room for."""
        for count in range(self._pool.statistics().free // self._slot_bytes, 0, -1):
            try:
                self._pool.reserve([self._slot_bytes] * count).release()
            except CapacityError:
                continue
            return count
        return 0

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Whether a parameter's partition, or so many elements, are large enough to be swapped."""
        if (param is None) == (numel is None):
            raise UnsupportedError("Give either a parameter or a number of elements")
        size = param.ds_tensor.ds_numel if numel is None else numel
        return bool(self.min_aio_bytes <= size * self._itemsize)

    def get_path(self, param: Any, must_exist: bool = False) -> str:
        """Return the path of a parameter's file.

        Raises
        ------
        MissingNameError
            `must_exist`, and it was never asked for before.
        """
        path = self._paths.get(param.ds_id)
        if path is None:
            if must_exist:
                raise MissingNameError(f"Parameter {param.ds_id} has no file")
            path = os.path.join(self.swap_folder, f"{param.ds_id}_param.tensor.swp")
            self._paths[param.ds_id] = path
        return path

    # -- buffers ---------------------------------------------------------------------------------

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Take a buffer for a parameter; return it as a tensor of `numel` elements.

        Raises
        ------
        CapacityError
            There is no room.
        BusyError
            The parameter has a buffer.
        """
        if param.ds_id in self._buffers:
            raise BusyError(f"Parameter {param.ds_id} has a buffer already")
        self._buffers[param.ds_id] = self._allocate(numel)
        self._numels[param.ds_id] = numel
        return self._buffers[param.ds_id].tensor[:numel]

    def reserve_available_buffers(self) -> list[torch.Tensor]:
        """Lend all room there is, in buffers of the largest size, until they are released."""
        numel = self._slot_bytes // self._itemsize
        count = self.available_swap_in_buffers()
        fresh = [self._pool.allocate(numel, self.dtype) for _ in range(count)]
        self._reserved += fresh
        size = self._aligned(self.elements_per_buffer)
        return [buffer.tensor[:size] for buffer in fresh]

    def release_reserved_buffers(self) -> None:
        """Take back what `reserve_available_buffers` lent."""
        while self._reserved:
            self._reserved.pop().release()

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Let go of the memory of partitions, which are NOT_AVAILABLE from now on."""
        for param in params:
            buffer = self._buffers.pop(param.ds_id, None)
            if buffer is not None:
                buffer.release()
            param.ds_tensor.data = self._nothing.data
            param.ds_tensor.status = status_type().NOT_AVAILABLE

    # -- writing ---------------------------------------------------------------------------------

    def swap_out_and_release(
        self, params: Sequence[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Write partitions from their buffers and let these go: now, or at `synchronize_writes`.

        Raises
        ------
        UnsupportedError
            `async_op` without `force_buffer_release`, or a parameter has no buffer.
        SpillError
            A write failed; the partitions keep their buffers.
        """
        if async_op and not force_buffer_release:
            raise UnsupportedError("async_op lets buffers go later: set force_buffer_release too")
        params = list(params)
        without = [param.ds_id for param in params if param.ds_id not in self._buffers]
        if without:
            raise UnsupportedError(f"Parameter {without[0]} has no buffer to write")
        moves = [(self.get_path(p), self._buffers[p.ds_id].tensor) for p in params]
        for param in params:
            self._numels[param.ds_id] = param.ds_tensor.ds_numel
        self._writes.append((self._move(moves, write=True), params))
        if not async_op:
            self.synchronize_writes()

    def synchronize_writes(self) -> None:
        """Wait for all writes, and let their buffers go.

        Raises
        ------
        SpillError
            One failed: its partitions are as before; the others' are away.
        """
        writes, self._writes = self._writes, []
        errors = []
        for transfer, params in writes:
            error = transfer.exception()
            if error is None:
                self.remove_partition_and_release_buffers(params)
            else:
                errors.append(error)
        if errors:
            raise errors[0]

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Take memory for `swap_out_partitioned_params` of partitions of these sizes together."""
        numel = sum(self._aligned(size) for size in partition_num_elems)
        if self._casting is not None:
            pinned_tensors.free(self._casting.data_ptr())
        self._casting = pinned_tensors.allocate(numel, self.dtype)

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Write new values, converted to the swapper's dtype, to the files of parameters.

        Raises
        ------
        UnsupportedError
            No memory was reserved for it, or less than they need, or the lengths differ.
        MissingNameError
            A parameter has no file.
        SpillError
            A write failed.
        """
        space = self._casting
        sizes = [self._aligned(source.numel()) for source in src_fp32_params]
        if len(dst_fp16_params) != len(src_fp32_params):
            raise UnsupportedError("There must be a source for each parameter")
        if space is None or sum(sizes) > space.numel():
            raise UnsupportedError("Call reserve_partitioned_swap_space for this much first")
        paths = [self.get_path(param, must_exist=True) for param in dst_fp16_params]
        self.synchronize_writes()
        pieces = torch.split(space[: sum(sizes)], sizes)
        for piece, source in zip(pieces, src_fp32_params, strict=True):
            piece[: source.numel()].copy_(source.reshape(-1))
        self._move(list(zip(paths, pieces, strict=True)), write=True).result()
        for param in dst_fp16_params:
            param.ds_tensor.status = status_type().NOT_AVAILABLE

    # -- reading ---------------------------------------------------------------------------------

    def swap_in(
        self,
        params: Sequence[Any],
        async_op: bool = True,
        swap_in_buffers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Read partitions into the swapper's memory, or into given buffers.

        They are INFLIGHT until `synchronize_reads`, which this calls unless `async_op`.

        Raises
        ------
        UnsupportedError
            A partition is not NOT_AVAILABLE.
        CapacityError
            There is no room; nothing changed.
        SpillError
            A read can't begin, or failed.
        """
        params = list(params)
        self._check_away(params)
        paths = [self.get_path(param, must_exist=True) for param in params]
        if swap_in_buffers is None:
            buffers = self._take(params)
            whole: Sequence[torch.Tensor] = [buffer.tensor for buffer in buffers]
        else:
            buffers, whole = [], list(swap_in_buffers)
        try:
            transfer = self._move(list(zip(paths, whole, strict=True)), write=False)
        except BaseException:
            for buffer in buffers:
                buffer.release()
            raise
        if buffers:
            owners = (param.ds_id for param in params)
            self._buffers.update(zip(owners, buffers, strict=True))
        for param in params:
            param.ds_tensor.status = status_type().INFLIGHT
        self._reads.append((transfer, params, whole))
        if not async_op:
            self.synchronize_reads()

    def synchronize_reads(self) -> None:
        """Wait for all reads; their partitions are AVAILABLE from now on.

        Raises
        ------
        SpillError
            One failed: its partitions are NOT_AVAILABLE again, and their buffers free.
        """
        reads, self._reads = self._reads, []
        errors = []
        for transfer, params, memory in reads:
            error = transfer.exception()
            if error is not None:
                errors.append(error)
                self.remove_partition_and_release_buffers(params)
                continue
            for param, whole in zip(params, memory, strict=True):
                param.ds_tensor.data = whole[: self._numels[param.ds_id]].data
                param.ds_tensor.status = status_type().AVAILABLE
        if errors:
            raise errors[0]

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Read a partition into memory of the caller's, and wait; the partition stays away.

        Raises
        ------
        UnsupportedError
            The partition is not NOT_AVAILABLE, or the buffer can't be used.
        SpillError
            The read failed.
        """
        self._check_away([param])
        memory = dest_buffer.detach()
        numel = min(memory.numel(), self._numels.get(param.ds_id, memory.numel()))
        self._move([(self.get_path(param, True), memory[:numel])], write=False).result()

    # -- how it is done --------------------------------------------------------------------------

    @property
    def _itemsize(self) -> int:
        return self.dtype.itemsize

    def _aligned(self, numel: int) -> int:
        return round_up(numel, self.numel_alignment)

    def _allocate(self, numel: int) -> Buffer:
        if numel > self.elements_per_buffer:
            raise CapacityError(
                f"A partition of {numel} elements is larger than buffer_size",
                asked=numel * self._itemsize,
                free=self._pool.statistics().free,
                largest=self.elements_per_buffer * self._itemsize,
                remedy="Raise offload_param's buffer_size",
            )
        return self._pool.allocate(self._aligned(numel), self.dtype)

    def _take(self, params: Sequence[Any]) -> list[Buffer]:
        """Allocate a buffer for each parameter, or none."""
        taken: list[Buffer] = []
        try:
            for param in params:
                if param.ds_id in self._buffers:
                    raise BusyError(f"Parameter {param.ds_id} has a buffer already")
                taken.append(self._allocate(self._numels[param.ds_id]))
        except BaseException:
            for buffer in taken:
                buffer.release()
            raise
        return taken

    def _check_away(self, params: Sequence[Any]) -> None:
        away = status_type().NOT_AVAILABLE
        for param in params:
            if param.ds_tensor.status != away:
                raise UnsupportedError(
                    f"Parameter {param.ds_id} is {param.ds_tensor.status.name}, not on the drive"
                )

    def _move(self, moves: Sequence[tuple[str, torch.Tensor]], *, write: bool) -> Transfer:
        """Begin one batch for each engine, and return one transfer for all."""
        batches: dict[Engine, list[Request]] = {}
        for path, memory in moves:
            if write:
                engine, file = self._files.writable(path, memory.device, memory.nbytes)
            else:
                engine, file = self._files.readable(path, memory.device)
            batches.setdefault(engine, []).append(Request(memory, file, write=write))
        return gather([engine.submit(requests) for engine, requests in batches.items()])


def _folder(nvme_path: str | os.PathLike[str], dtype: torch.dtype) -> str:
    """Make this rank's folder and return its path."""
    rank = 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    name = str(dtype).removeprefix("torch.")
    folder = os.path.join(nvme_path, "zero_stage_3", f"{name}params", f"rank{rank}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return os.path.abspath(folder)
