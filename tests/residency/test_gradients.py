"""Spilled gradients: the same bits as in memory, whoever adds to them, clips or clears them."""

import pytest
import torch
from torch import nn

from tensorspill.errors import BrokenError, CapacityError, UnsupportedError
from tensorspill.residency import Residency
from tensorspill.residency.packs import lay_out
from tests.residency.models import (
    SOME_KINDS,
    Frozen,
    Model,
    Perceptron,
    Reused,
    Trainer,
    batches,
    loss_of,
    units_of,
)
from tests.residency.test_residency import (
    check_equal,
    check_idle,
    make,
    no_room_for_writes,
    one_thread,
    pool_bytes,
    scattered,
)

__all__ = ["one_thread"]


class SpillingTrainer(Trainer):
    """Updates block by block, with the gradients brought for it."""

    residency: Residency

    def update(self) -> None:
        gradients = self.residency.gradients
        for _, optimizer, mine in self.optimizers:
            with self.residency.updating_parameters(mine), gradients.bringing(mine):  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()


def spilling(model, swapper, gradient_bytes=None):
    residency = Residency(model, units_of(model), swapper)
    # Those of a block are brought together, and lie in as many packs as there are parameters.
    largest = max(sum(p.nbytes + 8192 for p in block.parameters()) for block in model.blocks)
    residency.spill_gradients(largest if gradient_bytes is None else gradient_bytes)
    trainer = SpillingTrainer(model, residency)
    trainer.residency = residency
    return residency, trainer


def is_away(parameter):
    return parameter.grad is not None and bool(parameter.grad.isnan().all())


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_training_gives_the_same_bits(tmp_path, kind):
    model, reference = make(kind)
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        residency, ours = spilling(model, swapper)
        assert ours.train(3) == Trainer(reference).train(3)
        check_idle(residency)
        residency.close(restore=True)
    check_equal(model, reference)


def test_gradients_that_are_asked_for_leave_the_spilled_ones_alone(tmp_path):
    """`torch.autograd.grad` between backward and step adds to nothing."""
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency, ours = spilling(model, swapper)
        theirs = Trainer(reference)
        first, second = batches(2)
        for each, trainer in ((model, ours), (reference, theirs)):
            loss_of(each, first).backward()
            wanted = [p for p in each.parameters() if p.requires_grad]
            found = torch.autograd.grad(loss_of(each, second), wanted)
            assert all(gradient.isfinite().all() for gradient in found)
            trainer.update()
        residency.close(restore=True)
    check_equal(model, reference)


@pytest.mark.parametrize("kind", [Model, Reused, Frozen])
def test_gradients_accumulate(tmp_path, kind):
    model, reference = make(kind)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency, ours = spilling(model, swapper)
        for each in (model, reference):
            for text in batches(3):
                loss_of(each, text).backward()
        spilled = [p for block in model.blocks for p in block.parameters() if p.requires_grad]
        assert all(map(is_away, spilled))
        assert all(residency.gradients.has(p) for p in spilled)
        residency.flush()
        assert residency.gradients.pool.statistics().allocated == 0
        residency.close(restore=True)
    check_equal(model, reference)
    del ours


def test_only_packs_take_memory_and_the_budget_is_kept(tmp_path):
    model, _ = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency, ours = spilling(model, swapper)
        ours.train(2)
        pool = residency.gradients.pool.statistics()
        assert 0 < pool.peak_allocated <= pool.capacity
        moved = residency.statistics()
        spilled = sum(p.nbytes for p in model.blocks.parameters())
        assert moved.gradients_out >= 2 * spilled
        residency.close()


def test_clearing_forgets(tmp_path):
    model, reference = make(Model)
    first, second = batches(2)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency, _ = spilling(model, swapper)
        loss_of(model, first).backward()
        model.zero_grad()
        assert not any(residency.gradients.has(p) for p in model.parameters())
        loss_of(model, second).backward()
        loss_of(reference, second).backward()
        some = list(model.blocks[2].parameters())
        residency.gradients.forget(some)
        assert all(p.grad is None for p in some)
        for parameter in reference.blocks[2].parameters():
            parameter.grad = None
        residency.close(restore=True)
    check_equal(model, reference)


def test_changes_are_written_if_they_should_be(tmp_path):
    model, reference = make(Model)
    text = next(batches(1))
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency, _ = spilling(model, swapper)
        gradients = residency.gradients
        for each in (model, reference):
            loss_of(each, text).backward()
        for block, other in zip(model.blocks, reference.blocks, strict=True):
            for ours, theirs in zip(block.parameters(), other.parameters(), strict=True):
                with gradients.bringing([ours], changing=True):
                    assert torch.equal(ours.grad, theirs.grad)
                    ours.grad.mul_(0.5)
                theirs.grad.mul_(0.5)
        weight, other = model.blocks[0].expand.weight, reference.blocks[0].expand.weight
        with gradients.bringing([weight], changing=True):
            weight.grad = torch.ones_like(weight)
        other.grad = torch.ones_like(other)
        bias = model.blocks[1].expand.bias
        with gradients.bringing([bias]):
            bias.grad = None
        assert bias.grad is None
        assert not gradients.has(bias)
        reference.blocks[1].expand.bias.grad = None
        residency.close(restore=True)
    check_equal(model, reference)


def test_fetching_ahead(tmp_path):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        residency, _ = spilling(model, swapper, 1 << 20)
        gradients = residency.gradients
        text = next(batches(1))
        for each in (model, reference):
            loss_of(each, text).backward()
        residency.flush()
        mine = list(model.blocks[3].parameters())
        gradients.fetch_ahead(mine)
        gradients.fetch_ahead(mine)
        before = residency.statistics().gradients_in
        with gradients.bringing(mine):
            for ours, theirs in zip(mine, reference.blocks[3].parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad)
        assert residency.statistics().gradients_in == before > 0
        residency.close()


class Large(Model):
    def make_block(self, number):
        return Perceptron(4000)


def test_more_than_fits_at_once(tmp_path):
    model, reference = make(Large)
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        residency, ours = spilling(model, swapper, 1 << 20)
        gradients = residency.gradients
        text = next(batches(1))
        for each in (model, reference):
            loss_of(each, text).backward()
        everything = list(model.blocks.parameters())
        assert gradients.memory_for(everything) > gradients.pool.capacity
        with pytest.raises(CapacityError), gradients.bringing(everything):
            pass
        residency.close(restore=True)
    check_equal(model, reference)
    del ours


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_of_gradients_and_sparse_ones_stay_in_memory(tmp_path):
    class Looking(Model):
        def make_block(self, number):
            return nn.Embedding(32, 24, sparse=True)

        def through(self, x):
            text = torch.arange(9)
            for block in self.blocks:
                x = x * block(text).tanh()
            return x

    model, reference = make(Looking)
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        residency, _ = spilling(model, swapper)
        for each in (model, reference):
            loss_of(each, next(batches(1))).backward()
        residency.close(restore=True)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad.to_dense(), theirs.grad.to_dense())
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        residency, _ = spilling(model, swapper)
        for each in (model, reference):
            loss_of(each, next(batches(1))).backward()
            loss_of(each, next(batches(1))).backward(create_graph=True)
        assert model.blocks[0].expand.weight.grad is not None
        assert model.blocks[0].expand.weight.grad.requires_grad
        residency.close(restore=True)
    check_equal(model, reference)


def test_a_drive_that_fails_in_backward(tmp_path):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency, ours = spilling(model, swapper)
        theirs = Trainer(reference)
        assert ours.train(1) == theirs.train(1)
        text = next(batches(1))
        with no_room_for_writes(), pytest.raises(BrokenError):  # noqa: PT012
            loss_of(model, text).backward()
            residency.flush()
        model.zero_grad()
        assert ours.train(2) == theirs.train(2)
        check_idle(residency)
        residency.close(restore=True)
    check_equal(model, reference)


def test_budgets_that_are_too_small(tmp_path):
    model, _ = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        with pytest.raises(CapacityError, match="smallest that works"):
            residency.spill_gradients(4096)
        residency.spill_gradients("1MiB")
        with pytest.raises(UnsupportedError, match="already"):
            residency.spill_gradients("1MiB")
        residency.close()


def test_how_packs_are_laid_out():
    sizes = [100, 16, 16, 400, 16, 3]
    parameters = [torch.empty(size) for size in sizes]
    packs = [[p.numel() for p in pack] for pack in lay_out(parameters, 640)]
    assert packs == [[100, 16, 16], [400], [16, 3]]
    assert lay_out([], 640) == []
