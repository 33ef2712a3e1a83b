"""A spilled optimizer of an offloaded model: nothing of it has to be in memory as a whole."""

import copy

import pytest
import torch

from tensorspill.optimizer import clip_grad_norm_
from tensorspill.training import offload, offloaded
from tests.optimizer.helpers import same_parameters, same_state, spilled
from tests.residency.models import KINDS, SOME_KINDS, batches, loss_of

AdamW = torch.optim.AdamW


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute in one thread: with models this small, several would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def models(kind):
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


def offload_tightly(model, folder, gradients):
    """Offload a model with about the smallest budget that leaves room for two blocks."""
    total = sum(p.nbytes for p in model.parameters())
    options = {"min_bytes": 500, "gradients": gradients, "blocks": list(model.blocks)}
    return offload(model, folder, max(total * 2 // 3, 100_000), **options)


def run(ours, theirs, optimizer, reference, clip=None, micro=1):
    norms = []
    for number, text in enumerate(batches(3 * micro)):
        for model, one, clipped in (
            (ours, optimizer, clip_grad_norm_),
            (theirs, reference, torch.nn.utils.clip_grad_norm_),
        ):
            loss_of(model, text).backward()
            if number % micro < micro - 1:
                continue
            if clip is not None:
                norm = clipped(model.parameters(), clip)
                norms.append(norm)
            one.step()
            one.zero_grad()
        if clip is not None and number % micro == micro - 1:
            assert torch.equal(*norms[-2:])


def finish(ours, theirs):
    offloaded(ours).close(restore=True)
    same_parameters(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("kind", SOME_KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_model(kind, tmp_path):
    ours, theirs = models(kind)
    offload_tightly(ours, tmp_path / "model", "spilled")
    reference = AdamW(theirs.parameters(), lr=0.01)
    parameters = ours.parameters()
    with spilled(AdamW, parameters, tmp_path / "state", budget="448KiB", lr=0.01) as optimizer:
        run(ours, theirs, optimizer, reference)
        same_state(optimizer, reference)
    finish(ours, theirs)


@pytest.mark.parametrize("gradients", ["memory", "spilled"])
@pytest.mark.parametrize("clip", [1e-3, 1e6])
def test_clipping_and_accumulation(clip, gradients, tmp_path):
    ours, theirs = models(KINDS[0])
    offload_tightly(ours, tmp_path / "model", gradients)
    reference = AdamW(theirs.parameters(), lr=0.01)
    parameters = ours.parameters()
    with spilled(AdamW, parameters, tmp_path / "state", budget="448KiB", lr=0.01) as optimizer:
        run(ours, theirs, optimizer, reference, clip, micro=3)
    finish(ours, theirs)


def test_norms_that_are_not_finite(tmp_path):
    ours, _ = models(KINDS[0])
    offload_tightly(ours, tmp_path, "spilled")
    (loss_of(ours, next(batches(1))) * float("inf")).backward()
    with pytest.raises(RuntimeError, match="not finite"):
        clip_grad_norm_(ours.parameters(), 1.0, error_if_nonfinite=True)
    offloaded(ours).close(restore=True)


@pytest.mark.parametrize("gradients", ["memory", "spilled"])
def test_masters_of_an_offloaded_model(gradients, tmp_path):
    ours, theirs = models(KINDS[0])
    for model in (ours, theirs):
        model.bfloat16()
    offload_tightly(ours, tmp_path / "model", gradients)
    options = {"budget": "448KiB", "lr": 0.01, "master_dtype": torch.float32}
    with (
        spilled(AdamW, ours.parameters(), tmp_path / "a", **options) as first,
        spilled(AdamW, theirs.parameters(), tmp_path / "b", **options) as second,
    ):
        run(ours, theirs, first, second)
        same_state(first, second)
        first.load_state_dict(second.state_dict())
        run(ours, theirs, first, second)
    finish(ours, theirs)
