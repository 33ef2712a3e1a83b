"""Training with parameters on the drive is training in memory, to the last bit.

Buffers are handed out at random places of a pool that is full of NaN, so that whoever uses memory
that was let go, or was never theirs, gets other numbers.
"""

import copy
import inspect
import itertools
import pickle
import random
import resource
import signal
import sys
from contextlib import contextmanager

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tensorspill.errors import (
    BrokenError,
    CapacityError,
    ClosedError,
    UnsupportedError,
)
from tensorspill.pool import BufferPool, ExtentAllocator
from tensorspill.residency import Residency, footprint
from tensorspill.swap.swapper import ParameterSwapper
from tests.residency.models import (
    KINDS,
    VALUES,
    WIDTH,
    Checkpointed,
    CheckpointedInside,
    Model,
    Nested,
    Perceptron,
    ReentrantlyCheckpointed,
    Tied,
    Trainer,
    batches,
    loss_of,
    units_of,
)
from tests.thorough import examples


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute in one thread: with models this small, several would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Scattering(ExtentAllocator):
    """Puts extents into random holes, at either end, so that one hole stays one."""

    def __init__(self, capacity: int, seed: int):
        super().__init__(capacity)
        self.random = random.Random(seed)

    def _choose(self, holes, size):
        fitting = [index for index in range(len(holes)) if holes.sizes[index] >= size]
        if not fitting:
            return None
        index = self.random.choice(fitting)
        start, end = int(holes.starts[index]), int(holes.starts[index] + holes.sizes[index])
        return index, self.random.choice((start, end - size))


@contextmanager
def scattered(folder, budget, *, seed=0, dtype=torch.float32, min_bytes=0):
    """Open a swapper whose buffers are at random places, and poisoned whenever they are free."""
    pool = BufferPool(budget, page_lock="no", allocator=Scattering(budget, seed), poison=True)
    with (
        pool,
        ParameterSwapper(
            folder, dtype=dtype, budget=budget, min_bytes=min_bytes, pool=pool
        ) as swapper,
    ):
        yield swapper


def sizes(model, units=None):
    return footprint(model, units_of(model) if units is None else units, lambda _: True)


def budgets(model):
    """Return the pool's bytes: for one block, for two, and for all of them."""
    needs = sizes(model)
    one, two = needs.smallest_budget, needs.prefetch_budget
    everything = needs.outside_bytes + sum(4096 + p.nbytes for p in model.parameters())
    return {"one": one, "two": two, "all": everything}


def pool_bytes(model, budget):
    return (budgets(model)[budget] - sizes(model).outside_bytes) // 4096 * 4096


def make(kind, seed=0):
    """Return two equal models."""
    torch.manual_seed(seed)
    model = kind()
    return model, copy.deepcopy(model)


def check_idle(residency):
    statistics = residency.statistics()
    assert statistics.pinned_bytes == 0
    assert statistics.peak_bytes <= statistics.budget_bytes
    assert statistics.resident_bytes <= statistics.peak_bytes


def check_equal(model, reference):
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert torch.equal(ours.grad, theirs.grad)


def name_of(model, module):
    return next(name for name, known in model.named_modules() if known is module)


def is_placeholder(parameter):
    return bool(parameter.isnan().all())


# -- equality ------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["one", "all", pytest.param("two", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_bits(tmp_path, kind, budget):
    model, reference = make(kind)
    expected = Trainer(reference).train(3)
    with scattered(tmp_path, pool_bytes(model, budget)) as swapper:
        residency = Residency(model, units_of(model), swapper)
        assert Trainer(model, residency).train(3) == expected
        check_idle(residency)
        residency.close(restore=True)
        check_equal(model, reference)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_looking_less_far_ahead_gives_the_same_bits(tmp_path, prefetch):
    model, reference = make(Model)
    expected = Trainer(reference).train(3)
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        residency = Residency(model, units_of(model), swapper, prefetch=prefetch)
        assert Trainer(model, residency).train(3) == expected
        residency.close(restore=True)
    check_equal(model, reference)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_every_kind_of_optimizer_loop(tmp_path, options):
    model, reference = make(Model)
    expected = Trainer(reference, **options).train(3)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        assert Trainer(model, residency, **options).train(3) == expected


def test_half_precision(tmp_path):
    model, reference = make(lambda: Model().to(torch.bfloat16))
    expected = Trainer(reference).train(3)
    with scattered(tmp_path, pool_bytes(model, "two"), dtype=torch.bfloat16) as swapper:
        residency = Residency(model, units_of(model), swapper)
        assert Trainer(model, residency).train(3) == expected


@pytest.mark.parametrize("kind", [Model, Checkpointed])
def test_autocast(tmp_path, kind):
    model, reference = make(kind)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        losses: list[list[float]] = []
        for trainer in (Trainer(model, residency), Trainer(reference)):
            losses.append([])
            for text in batches(3):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(trainer.model, text)
                loss.backward()
                trainer.update()
                losses[-1].append(loss.item())
        assert losses[0] == losses[1]
        residency.close(restore=True)
    check_equal(model, reference)


@st.composite
def programs(draw):
    """Return how a random model is made, called and spilled."""
    count = draw(st.integers(1, 5))
    index = st.integers(0, count - 1)
    return {
        "hidden": draw(st.lists(st.integers(1, 96), min_size=count, max_size=count)),
        "calls": draw(st.lists(st.tuples(index, st.booleans()), min_size=1, max_size=8)),
        "ties": draw(st.lists(st.tuples(index, index), max_size=2)),
        "frozen": draw(st.lists(st.tuples(index, st.integers(0, 5)), max_size=4)),
        "skips": draw(st.sets(st.integers(0, 7), max_size=3)),
        "budget": draw(st.sampled_from(["one", "two", "all"])),
        "prefetch": draw(st.sampled_from([None, 0])),
        "seed": draw(st.integers(0, 1 << 16)),
    }


class Program(Model):
    """A model that calls its blocks as a random program says."""

    def __init__(self, program):
        self.program = program
        super().__init__(len(program["hidden"]))
        for first, second in program["ties"]:
            self.blocks[second].norm = self.blocks[first].norm
        for number, position in program["frozen"]:
            list(self.blocks[number].parameters())[position].requires_grad_(False)

    def make_block(self, number):
        return Perceptron(self.program["hidden"][number])

    def through(self, x):
        first = x
        for place, (number, recomputed) in enumerate(self.program["calls"]):
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
            if place in self.program["skips"]:
                x, first = x + first, x
        return x


@hypothesis.settings(
    max_examples=examples(25),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(programs())
def test_random_programs_give_the_same_bits(tmp_path, program):
    model, reference = make(lambda: Program(program), program["seed"])
    expected = Trainer(reference).train(2)
    budget = pool_bytes(model, program["budget"])
    with scattered(tmp_path, budget, seed=program["seed"]) as swapper:
        residency = Residency(model, model.blocks, swapper, prefetch=program["prefetch"])
        assert Trainer(model, residency).train(2) == expected
        check_idle(residency)
        residency.close(restore=True)
    check_equal(model, reference)


# -- that such a test would notice ---------------------------------------------------------------


class Unpacked(Model):
    """Blocks whose saved tensors are kept as they are, as if nobody looked after them."""

    class Block(Perceptron):
        def forward(self, x):
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return super().forward(x)

    def make_block(self, number):
        return self.Block(32 * (number % 3 + 1))


def test_views_kept_as_tensors_are_noticed(tmp_path):
    model, reference = make(Unpacked)
    expected = Trainer(reference).train(3)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        assert Trainer(model, residency).train(3) != expected


def test_a_block_used_behind_our_back_is_noticed(tmp_path):
    model, _ = make(Model)
    with (
        scattered(tmp_path, pool_bytes(model, "one")) as swapper,
        Residency(model, units_of(model), swapper),
    ):
        weight = model.blocks[1].expand.weight
        assert is_placeholder(weight)
        assert weight.shape == (64, WIDTH)
        x = torch.ones(1, WIDTH)
        assert nn.functional.linear(x, weight).isnan().all()
        assert not model.blocks[1](x).isnan().any()


# -- what is in memory when ----------------------------------------------------------------------


def test_only_the_block_in_use_is_in_memory(tmp_path):
    model, _ = make(Model)
    seen = []

    def look(module, *_):
        seen.append([number for number, b in enumerate(model.blocks) if not hidden(b)])

    def hidden(block):
        return is_placeholder(block.expand.weight)

    for block in model.blocks:
        block.contract.register_forward_pre_hook(look)
        block.contract.register_full_backward_hook(look)
    with (
        scattered(tmp_path, pool_bytes(model, "all")) as swapper,
        Residency(model, units_of(model), swapper, prefetch=0),
    ):
        loss_of(model, next(batches(1))).backward()
        assert seen == [[0], [1], [2], [3], [4], [4], [3], [2], [1], [0]]
        assert all(map(hidden, model.blocks))


def test_accounts_are_exact(tmp_path):
    model, _ = make(Model)
    needs = sizes(model)
    pool = BufferPool(pool_bytes(model, "two"), page_lock="no")
    with ParameterSwapper(
        tmp_path, dtype=torch.float32, budget=pool.capacity, min_bytes=0, pool=pool
    ) as swapper:
        residency = Residency(model, units_of(model), swapper)
        Trainer(model, residency).train(3)
        statistics = residency.statistics()
        spilled = sum(p.nbytes for p in model.blocks.parameters())
        assert statistics.spilled_bytes == spilled
        assert statistics.outside_bytes == needs.outside_bytes == needs.total_bytes - spilled
        peak = pool.statistics().peak_allocated
        assert statistics.peak_bytes == statistics.outside_bytes + peak
        assert statistics.budget_bytes == statistics.outside_bytes + pool.capacity
        held = statistics.resident_bytes - statistics.outside_bytes
        assert held == pool.statistics().allocated
        residency.flush()
        assert residency.statistics().resident_bytes == statistics.outside_bytes
        assert pool.statistics().allocated == 0
        moved = residency.statistics()
        assert moved.bytes_out == 3 * spilled
        assert moved.visits == 3 * (5 + 5 + 5)
        assert 0 <= moved.stalled_seconds <= moved.transfer_seconds
        assert 0 <= moved.hidden_pct <= 100


def test_what_comes_next_is_fetched_ahead(tmp_path):
    model, _ = make(lambda: Model(3))
    with torch.no_grad():
        for block in model.blocks:
            block.expand = nn.Linear(WIDTH, 48)
            block.contract = nn.Linear(48, WIDTH)
    with (
        ParameterSwapper(
            tmp_path, dtype=torch.float32, budget=pool_bytes(model, "two"), min_bytes=0
        ) as swapper,
        torch.no_grad(),
    ):
        residency = Residency(model, units_of(model), swapper)
        text = next(batches(1))
        model(text)
        model(text)
        before = residency.statistics()
        model(text)
        after = residency.statistics()
        assert after.on_demand == before.on_demand
        assert after.ahead == before.ahead + 3


def test_a_model_that_is_never_in_memory(tmp_path):
    expected, _ = make(Model)
    needs = sizes(expected)
    largest = max(sum(p.nbytes for p in block.parameters()) for block in expected.blocks)
    torch.manual_seed(0)
    with scattered(tmp_path, pool_bytes(expected, "one")) as swapper:
        model = Model(0)
        residency = Residency(model, (), swapper)
        for number in range(5):
            model.blocks.append(Model.make_block(model, number))
            residency.add(model.blocks[-1])
        statistics = residency.statistics()
        assert statistics.peak_bytes <= needs.outside_bytes + largest
        assert statistics.outside_bytes == needs.outside_bytes
        assert statistics.blocks == 5
        assert len(Trainer(model, residency).train(2)) == 2


def test_small_parameters_stay_in_memory(tmp_path):
    model, reference = make(Model)
    expected = Trainer(reference).train(3)
    with scattered(tmp_path, pool_bytes(model, "two"), min_bytes=2048) as swapper:
        residency = Residency(model, units_of(model), swapper)
        assert not any(is_placeholder(p) for p in model.parameters() if p.nbytes < 2048)
        assert Trainer(model, residency).train(3) == expected


def test_other_dtypes_and_layouts_stay_in_memory(tmp_path):
    model, _ = make(Model)
    model.blocks[0].norm.to(torch.float64)
    model.blocks[1].expand.weight.data = model.blocks[1].expand.weight.data.t().contiguous().t()
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        assert not is_placeholder(model.blocks[0].norm.weight)
        assert not is_placeholder(model.blocks[1].expand.weight)
        assert residency.statistics().parameters == 5 * 6 - 3


# -- other ways to use a model -------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(tmp_path, mode):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        ours, theirs = Trainer(model, residency), Trainer(reference)
        for text in batches(3):
            assert ours.step(text) == theirs.step(text)
            with mode():
                assert torch.equal(model(text), reference(text))
        check_idle(residency)


def test_the_whole_model_as_one_block(tmp_path):
    model, reference = make(Model)
    text = next(batches(1))
    nbytes = sum(4096 + p.nbytes for p in model.parameters()) // 4096 * 4096
    with scattered(tmp_path, nbytes) as swapper:
        residency = Residency(model, [model], swapper)
        assert is_placeholder(model.bytes.weight)
        for each in (model, reference):
            loss_of(each, text).backward()
        assert interrupt_at(20, lambda: loss_of(model, text))
        assert torch.equal(loss_of(model, text), loss_of(reference, text))
        residency.close(restore=True)
    check_equal(model, reference)


def test_dtypes_side_by_side(tmp_path):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
            self.turning = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

        def forward(self, x):
            turned = torch.complex(x, x.tanh()) @ self.turning.conj()
            parts = torch.view_as_real(self.turning).sum(-1) * self.turning.conj().imag
            x = x + turned.real * turned.imag + x @ parts
            x = x + self.narrow(x.bfloat16()).float()
            return torch.tanh(self.wide(x.double()).float())

    class Mixed(Model):
        def make_block(self, number):
            return Block()

    model, reference = make(Mixed)
    expected = Trainer(reference).train(2)
    with scattered(tmp_path, pool_bytes(model, "two"), dtype=None) as swapper:
        residency = Residency(model, units_of(model), swapper)
        assert residency.statistics().parameters == 5 * 5
        assert Trainer(model, residency).train(2) == expected
        residency.close(restore=True)
    check_equal(model, reference)


def test_gradients_accumulated_over_several_backwards(tmp_path):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        for trainer in (Trainer(model, residency), Trainer(reference)):
            for text in batches(4):
                loss_of(trainer.model, text).backward()
            first, second = (loss_of(trainer.model, text) for text in batches(2, seed=3))
            (first + second).backward()
            trainer.update()
        residency.close(restore=True)
    check_equal(model, reference)


def test_a_graph_that_is_kept(tmp_path):
    model, reference = make(Model)
    text = next(batches(1))
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        for each in (model, reference):
            loss = loss_of(each, text)
            loss.backward(retain_graph=True)
            loss.backward()
        check_idle(residency)
        residency.close(restore=True)
    check_equal(model, reference)


def test_gradients_of_gradients(tmp_path):
    model, reference = make(Model)
    given = torch.randn(2, WIDTH)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        for each in (model, reference):
            x = given.clone().requires_grad_()
            loss = each.through(x).square().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (slope.square().sum() + loss).backward()
        check_idle(residency)
        residency.close(restore=True)
    check_equal(model, reference)


def test_saved_tensors_can_be_looked_at(tmp_path):
    model, reference = make(lambda: Model(1))
    with (
        scattered(tmp_path, pool_bytes(model, "one")) as swapper,
        Residency(model, units_of(model), swapper) as residency,
    ):
        found = [
            each.blocks[0](torch.ones(2, WIDTH)).grad_fn.next_functions[1][0]._saved_mat2
            for each in (model, reference)
        ]
        assert torch.equal(*found)
        check_idle(residency)


@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedInside])
def test_checkpointing_still_recomputes(tmp_path, kind):
    model, _ = make(kind)
    with (
        scattered(tmp_path, pool_bytes(model, "two")) as swapper,
        Residency(model, units_of(model), swapper),
    ):
        loss_of(model, next(batches(1))).backward()
    blocks = [getattr(block, "inner", block) for block in model.blocks]
    assert [block.calls for block in blocks] == [2] * 5


def test_checkpointing_over_several_blocks(tmp_path):
    class Whole(Model):
        def through(self, x):
            return checkpoint(nn.Sequential(*self.blocks), x, use_reentrant=False)

    model, reference = make(Whole)
    expected = Trainer(reference).train(2)
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        assert Trainer(model, residency).train(2) == expected


def test_foreign_hooks_get_activations_and_no_parameters(tmp_path):
    model, reference = make(Model)
    text = next(batches(1))
    sizes_seen = []

    def pack(tensor):
        sizes_seen.append(tuple(tensor.shape))
        return tensor.clone()

    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, text)
        loss.backward()
        loss_of(reference, text).backward()
        residency.close(restore=True)
    check_equal(model, reference)
    assert (2, 9, WIDTH) in sizes_seen
    assert (WIDTH, 64) not in sizes_seen
    assert (64, WIDTH) not in sizes_seen


# -- updating and reading ------------------------------------------------------------------------


def test_changes_are_kept(tmp_path):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        for block in (*reference.blocks, *model.blocks):
            with residency.updating(block) if block in set(model.blocks) else torch.no_grad():
                block.expand.weight.data.mul_(2)
                block.contract.bias.data.fill_(3)
        with residency.updating(model.head, model.bytes):
            model.head.weight.data.add_(1)
        reference.head.weight.data.add_(1)
        for block, other in zip(model.blocks, reference.blocks, strict=True):
            with residency.resident(block):
                check_equal(block, other)
        residency.close(restore=True)
    check_equal(model, reference)


def test_changes_are_kept_when_the_update_raises(tmp_path):
    model, _ = make(Model)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        with (  # noqa: PT012
            pytest.raises(ZeroDivisionError),
            residency.updating(model.blocks[0]),
        ):
            model.blocks[0].expand.bias.data.fill_(5)
            raise ZeroDivisionError
        check_idle(residency)
        with residency.resident(model.blocks[0]):
            assert (model.blocks[0].expand.bias == 5).all()


@pytest.mark.parametrize("kind", [Model, Tied, Nested])
def test_state_is_saved_and_loaded_a_module_at_a_time(tmp_path, kind):
    model, reference = make(kind)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        saved = model.state_dict()
        expected = reference.state_dict()
        assert list(saved) == list(expected)
        assert all(torch.equal(saved[name], value) for name, value in expected.items())
        pairs = list(itertools.combinations(expected, 2))
        assert [saved[a].data_ptr() == saved[b].data_ptr() for a, b in pairs] == [
            expected[a].data_ptr() == expected[b].data_ptr() for a, b in pairs
        ]
        part = model.blocks[1].after if kind is Nested else model.blocks[1].contract
        assert torch.equal(part.state_dict()["bias"], saved[f"{name_of(model, part)}.bias"])
        doubled = {name: 2 * value for name, value in expected.items()}
        model.load_state_dict(doubled)
        reference.load_state_dict(doubled)
        check_idle(residency)
        residency.close(restore=True)
    check_equal(model, reference)


def test_states_that_cannot_be_saved_or_loaded(tmp_path):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        with pytest.raises(UnsupportedError, match="keep_vars"):
            model.state_dict(keep_vars=True)
        with pytest.raises(UnsupportedError, match="assign"):
            model.load_state_dict(reference.state_dict(), assign=True)
        wrong = reference.state_dict()
        wrong["blocks.1.expand.weight"] = torch.ones(3)
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(wrong)
        check_idle(residency)
        residency.close(restore=True)
    check_equal(model, reference)


def test_a_save_that_fails_holds_nothing(tmp_path):
    model, reference = make(Model)

    def fail(*_):
        raise ZeroDivisionError

    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        handle = model.blocks[1].expand.register_state_dict_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model.state_dict()
        handle.remove()
        check_idle(residency)
        assert Trainer(model, residency).train(2) == Trainer(reference).train(2)


def test_copies_and_pickles_are_refused(tmp_path):
    model, _ = make(Model)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        for part in (model, model.blocks[0], model.blocks[0].expand):
            with pytest.raises(UnsupportedError, match="copied"):
                copy.deepcopy(part)
            with pytest.raises(UnsupportedError, match="copied"):
                pickle.dumps(part)
        residency.close(restore=True)
        check_equal(copy.deepcopy(model), model)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_an_optimizer_does_not_step_on_placeholders(tmp_path, options):
    model, _ = make(Model)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        loss_of(model, next(batches(1))).backward()
        with pytest.raises(UnsupportedError, match="on the drive"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        residency.close()


def test_changes_behind_our_back(tmp_path):
    model, reference = make(Model)
    weight, other = model.blocks[1].expand.weight, reference.blocks[1].expand.weight
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        with residency.resident(model.blocks[1]), torch.no_grad():
            weight.mul_(2)
        with residency.resident(model.blocks[1]):
            weight.data = weight.data + 1
        other.data = other.data * 2 + 1
        text = next(batches(1))
        assert torch.equal(loss_of(model, text), loss_of(reference, text))
        residency.flush()
        weight.data = torch.zeros_like(weight)
        with pytest.raises(UnsupportedError, match=r"blocks\.1\.expand\.weight was given"):
            loss_of(model, text)
        check_idle(residency)
        assert torch.equal(loss_of(model, text), loss_of(reference, text))
        with pytest.raises(UnsupportedError, match="given"), residency.resident(model.blocks[1]):
            weight.data = torch.ones(2)
        residency.flush()
        residency.close(restore=True)
    check_equal(model, reference)


def test_a_change_between_forward_and_backward_is_refused(tmp_path):
    model, _ = make(Model)
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        loss = loss_of(model, next(batches(1)))
        with residency.updating(model.blocks[2]), torch.no_grad():
            model.blocks[2].expand.weight.add_(1)
        with pytest.raises(UnsupportedError, match="between forward and backward"):
            loss.backward()
        check_idle(residency)


def test_what_must_stay_is_kept(tmp_path):
    model, reference = make(Model)
    weight = model.blocks[1].expand.weight
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        residency.keep([weight, model.head.weight])
        residency.keep([weight])
        residency.flush()
        assert torch.equal(weight, reference.blocks[1].expand.weight)
        assert Trainer(model, residency).train(3) == Trainer(reference).train(3)
        with pytest.raises(CapacityError, match=r"blocks\.0.*at least"):
            residency.keep(model.blocks.parameters())
        residency.close(restore=True)
    check_equal(model, reference)


def test_frozen_parameters_are_not_written(tmp_path):
    model, _ = make(Model)
    block = model.blocks[0]
    block.requires_grad_(False)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        with residency.updating(block):
            pass
        residency.flush()
        assert residency.statistics().bytes_out == 0
        with residency.updating(block):
            block.expand.weight.add_(1)
        residency.flush()
        assert residency.statistics().bytes_out == block.expand.weight.nbytes


# -- errors --------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_says_what_works(tmp_path):
    model, _ = make(Model)
    needs = sizes(model)
    with scattered(tmp_path, pool_bytes(model, "one") - 4096) as swapper:
        with pytest.raises(CapacityError, match=str(needs.smallest_budget)) as caught:
            Residency(model, units_of(model), swapper)
        assert caught.value.free is not None
        assert caught.value.asked == caught.value.free + 4096
        assert not any(is_placeholder(p) for p in model.parameters())
        assert len(Trainer(model).train(1)) == 1
    with scattered(tmp_path, pool_bytes(model, "two") - 4096) as swapper:
        with pytest.raises(CapacityError, match=str(needs.prefetch_budget)):
            Residency(model, units_of(model), swapper, prefetch=1)
        Residency(model, units_of(model), swapper).close()


def test_asking_for_too_much_at_once(tmp_path):
    model, _ = make(Model)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        with pytest.raises(CapacityError, match="at least"), residency.resident(model):
            pass
        check_idle(residency)
        with residency.resident(model.blocks[2]):
            with pytest.raises(CapacityError, match="bytes in use"):
                model.blocks[1](torch.ones(1, WIDTH))
            assert not is_placeholder(model.blocks[2].expand.weight)
        check_idle(residency)
        assert len(Trainer(model, residency).train(1)) == 1


class Failing(torch.autograd.Function):
    """Raises in forward or in backward, if it is told to."""

    where = None
    error = ZeroDivisionError

    @staticmethod
    def forward(ctx, x):
        if Failing.where == "forward":
            raise Failing.error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Failing.where == "backward":
            raise Failing.error
        return gradient


class Fragile(Model):
    class Block(Perceptron):
        def forward(self, x):
            return super().forward(Failing.apply(x) if self.fragile else x)

    def make_block(self, number):
        block = self.Block(48)
        block.fragile = number == 2
        return block


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("budget", ["one", "all"])
def test_the_step_after_one_that_failed(tmp_path, where, error, budget):
    model, reference = make(Fragile)
    with scattered(tmp_path, pool_bytes(model, budget)) as swapper:
        residency = Residency(model, units_of(model), swapper)
        ours, theirs = Trainer(model, residency), Trainer(reference)
        for text in batches(3):
            Failing.where, Failing.error = where, error
            try:
                for trainer in (ours, theirs):
                    with pytest.raises(error):
                        loss_of(trainer.model, text).backward()
            finally:
                Failing.where = None
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.grad = None
            assert ours.step(text) == theirs.step(text)
            check_idle(residency)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        residency.close(restore=True)
    check_equal(model, reference)


def interrupt_at(count, action):
    """Act, with a Ctrl-C at the `count`-th call of a function of residency; say if it came."""
    left = count

    def profile(frame, event, _):
        nonlocal left
        code = frame.f_code
        # What is raised in a generator that is being dropped is lost.
        generator = code.co_flags & inspect.CO_GENERATOR
        if event == "call" and "/residency/" in code.co_filename and not generator:
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize(
    "kind",
    [
        Model,
        *(
            pytest.param(k, marks=pytest.mark.thorough)
            for k in (Checkpointed, ReentrantlyCheckpointed)
        ),
    ],
)
@pytest.mark.parametrize("budget", ["one", pytest.param("two", marks=pytest.mark.thorough)])
def test_an_interrupt_anywhere(tmp_path, kind, budget):
    model, reference = make(kind)
    text = next(batches(1))
    with scattered(tmp_path, pool_bytes(model, budget)) as swapper:
        residency = Residency(model, units_of(model), swapper)
        ours, theirs = Trainer(model, residency), Trainer(reference)
        count = 1
        while interrupt_at(count, lambda: loss_of(model, text).backward()):
            for parameter in model.parameters():
                parameter.grad = None
            assert ours.step(text) == theirs.step(text)
            check_idle(residency)
            count += 53
        assert count > 500
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@contextmanager
def no_room_for_writes():
    """Let every write past the first bytes of a file fail, as a full drive would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_drive_that_is_full_from_the_start(tmp_path):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "all")) as swapper:
        with no_room_for_writes(), pytest.raises(BrokenError):
            Residency(model, units_of(model), swapper)
        check_equal(model, reference)
        assert Trainer(model).train(2) == Trainer(reference).train(2)
        first = sum(p.nbytes for p in model.blocks[0].parameters())
    with ParameterSwapper(
        tmp_path, torch.float32, 1 << 20, min_bytes=0, capacity=first + (1 << 16)
    ) as swapper:
        with pytest.raises(CapacityError):
            Residency(model, units_of(model), swapper)
        check_equal(model, reference)
        assert Trainer(model).train(2) == Trainer(reference).train(2)


def test_a_write_that_fails_loses_nothing(tmp_path):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        ours, theirs = Trainer(model, residency), Trainer(reference)
        assert ours.train(1) == theirs.train(1)
        residency.flush()
        with no_room_for_writes():
            with pytest.raises(BrokenError):  # noqa: PT012
                with residency.updating(model.blocks[0]):
                    model.blocks[0].expand.weight.data.add_(1)
                residency.flush()
            with pytest.raises(BrokenError), residency.resident(model.blocks[1]):
                pass
        reference.blocks[0].expand.weight.data.add_(1)
        residency.flush()
        assert ours.train(2) == theirs.train(2)
        residency.close(restore=True)
    check_equal(model, reference)


def test_a_read_that_fails_ends_the_step(tmp_path):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        ours, theirs = Trainer(model, residency), Trainer(reference)
        assert ours.train(1) == theirs.train(1)
        residency.flush()
        (path,) = tmp_path.rglob("*.spill")
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(0)
        text = next(batches(1))
        with pytest.raises(BrokenError):
            loss_of(model, text)
        check_idle(residency)
        path.write_bytes(content)
        assert ours.train(2) == theirs.train(2)


def test_use_after_close(tmp_path):
    model, reference = make(Model)
    with scattered(tmp_path, pool_bytes(model, "one")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        residency.close(restore=True)
        residency.close()
        check_equal(model, reference)
        assert Trainer(model).train(2) == Trainer(reference).train(2)
        with pytest.raises(ClosedError), residency.updating(model.blocks[0]):
            pass
        with pytest.raises(ClosedError):
            residency.add(model.blocks[0])
        assert residency.statistics().blocks == 5


def test_what_is_no_block(tmp_path):
    model, _ = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, model.blocks[:3], swapper)
        with pytest.raises(UnsupportedError, match="module of the model"):
            residency.add(nn.Linear(2, 2))
        with pytest.raises(UnsupportedError, match="before"):
            residency.add(model.blocks[0])
        with pytest.raises(UnsupportedError, match="twice"):
            Residency(model, [model.blocks[4], model.blocks[4]], swapper)
        with pytest.raises(UnsupportedError, match="module of the model"):
            Residency(model, [model.blocks[4], nn.Linear(2, 2)], swapper)
        assert not is_placeholder(model.blocks[4].expand.weight)
        model.late = nn.Linear(WIDTH, 32)
        model.late.weight = model.blocks[0].expand.weight
        with pytest.raises(UnsupportedError, match="outside"):
            residency.add(model.blocks[3])


def test_values_of_bytes_are_learnt(tmp_path):
    # A sanity check of the models above: equal losses that don't fall would prove little.
    model, _ = make(Model)
    losses = Trainer(model).train(30)
    assert losses[-1] < losses[0] - 0.5
    assert VALUES == 32
