"""The kernels against what the GPU copies: bytes read and written a second, of its own memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.check import MIB, Check, cut_rounds
from benchmarks.gpu.timing import device_seconds
from benchmarks.rows import Compared, Row, at_least
from tensorspill.pool.digest import digest_reference
from tensorspill.pool.kernels import triton_launch
from tensorspill.pool.kernels.casting import cast
from tensorspill.pool.kernels.digesting import begin_digests
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.rounds import Case

__all__ = ["run"]

_WHOLE = 1024 * MIB
_COUNT = 1000


def run(check: Check) -> tuple[list[Row], list[str]]:
    """Measure digests and conversions, one tensor and many, and check what they compute."""
    nbytes = check.size(_WHOLE)
    if check.device.type == "cuda":
        nbytes = min(nbytes, torch.cuda.mem_get_info(check.device)[0] // 8 // 4096 * 4096)
    count = max(1, _COUNT // check.scale)
    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=check.device)
    # Bits of random bytes may be NaN, which is as fast.
    floats = source.view(torch.float32)
    other = torch.empty_like(source)
    halves = torch.empty(floats.numel(), dtype=torch.bfloat16, device=check.device)
    bounded: list[str] = []
    cases: dict[str, Case] = {
        "copy": _case(check, 2 * nbytes, lambda: other.copy_(source)),
        "torch cast": _case(check, nbytes + nbytes // 2, lambda: halves.copy_(floats)),
    }
    for name, pieces in (("one tensor", 1), (f"{count} tensors", count)):
        parts = _pieces(floats, pieces)
        targets = _pieces(halves, pieces)
        backs = _pieces(other.view(torch.float32), pieces)
        raw = _pieces(source, pieces)
        moved = nbytes + nbytes // 2
        ours = {
            f"digest, {name}": _case(check, nbytes, _sums(raw, check)),
            f"pack to bfloat16, {name}": _case(check, moved, _caster(parts, targets)),
            f"unpack to float32, {name}": _case(check, moved, _caster(targets, backs)),
        }
        bounded += ours
        cases |= ours
        cases[f"digest, {name}, host's part included"] = _whole(raw, nbytes)
    odd = [source[1:]]
    cases["digest, one tensor at an odd address"] = _case(check, nbytes - 1, _sums(odd, check))
    for case in cases.values():
        case()  # compiles
    results = cut_rounds(cases, check, 40.0)
    compared = Compared("kernels", results, "GB/s moved")
    rows = [
        compared.row(name, "copy", at_least(0.6) if name in bounded else None)
        for name in cases
        if name != "copy"
    ]
    _check(source, floats, halves)
    state = triton_launch.why_not()
    return rows, [f"Triton: {state or 'compiled'}", f"{nbytes >> 20} MiB in all"]


def _pieces(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut memory into as many tensors, or a few more, each aligned as allocations are."""
    step = max(1024, tensor.numel() // count // 1024 * 1024)
    return [tensor[begin : begin + step] for begin in range(0, tensor.numel(), step)]


def _case(check: Check, moved: int, work: Callable[[], object]) -> Case:
    return lambda: Sample(device_seconds(check, work), moved, 0.0)


def _sums(parts: list[torch.Tensor], check: Check) -> Callable[[], None]:
    def work() -> None:
        sums = torch.zeros(len(parts), dtype=torch.int64, device=check.device)
        triton_launch.launch_sums(parts, sums)

    return work


def _caster(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> Callable[[], None]:
    return lambda: cast(sources, targets)


def _whole(parts: list[torch.Tensor], nbytes: int) -> Case:
    return lambda: timed(lambda: begin_digests(parts).values(), nbytes)


def _check(source: torch.Tensor, floats: torch.Tensor, halves: torch.Tensor) -> None:
    """Compare with the definition, and with torch's own conversion, where that is not NaN."""
    part = source[3 : 3 + MIB + 5]
    if begin_digests([part]).values() != [digest_reference(part.cpu().numpy().tobytes())]:
        raise AssertionError("a digest is wrong")
    cast([floats], [halves])
    expected = floats.to(torch.bfloat16)
    kept = ~expected.isnan()
    if not torch.equal(halves.isnan(), ~kept) or not torch.equal(
        halves.view(torch.int16)[kept], expected.view(torch.int16)[kept]
    ):
        raise AssertionError("a conversion is wrong")
