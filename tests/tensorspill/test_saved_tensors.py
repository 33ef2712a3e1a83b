"""The chain of handlers behind the one pair of hooks for saved tensors."""

from contextlib import ExitStack

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tensorspill.saved_tensors import Saved, foreign_pair, hooks


class Copy(Saved):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.clone()

    def unpack(self) -> torch.Tensor:
        return self.tensor


class Keeper:
    """A handler that keeps copies of the tensors that it wants."""

    def __init__(self, wanted=lambda tensor: True):
        self.wanted = wanted
        self.seen: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> Copy | None:
        self.seen.append(tensor)
        if not self.wanted(tensor):
            return None
        self.kept.append(tensor)
        return Copy(tensor)


class Foreign:
    """A pair that counts what it gets, as other libraries push one."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0

    def pair(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        self.packed += 1
        return "foreign", tensor

    def unpack(self, packed: tuple[str, torch.Tensor]) -> torch.Tensor:
        self.unpacked += 1
        return packed[1]


def product_gradients(*contexts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a product that is computed in nested contexts."""
    left = torch.tensor([2.0, 3.0], requires_grad=True)
    right = torch.tensor([5.0, 7.0], requires_grad=True)
    for context in contexts:
        context.__enter__()
    result = (left * right).sum()
    for context in reversed(contexts):
        context.__exit__(None, None, None)
    result.backward()
    assert left.grad is not None
    assert right.grad is not None
    return left.grad, right.grad


def check_product(gradients: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert gradients[0].tolist() == [5.0, 7.0]
    assert gradients[1].tolist() == [2.0, 3.0]


def test_a_handler_keeps_what_it_wants_and_leaves_the_rest():
    keeper = Keeper(lambda tensor: tensor[0] == 2)
    check_product(product_gradients(hooks(keeper)))
    assert len(keeper.seen) == 2
    assert len(keeper.kept) == 1


def test_nested_handlers_are_all_asked_innermost_first():
    inner, outer = Keeper(lambda tensor: tensor[0] == 2), Keeper()
    first = hooks(outer)
    with first:
        second = hooks(inner)
        check_product(product_gradients(second))
    assert len(inner.seen) == 2
    assert [tensor[0].item() for tensor in outer.seen] == [5.0]


def test_who_takes_what_is_left_is_asked_last():
    """Wherever its context is: outside, inside, or between those of others."""
    x = torch.randn(5, requires_grad=True)
    for order in ("general first", "general last", "general between"):
        general, special = Keeper(), Keeper(lambda tensor: tensor.numel() == 5)
        other = Keeper(lambda tensor: False)
        names = {"general first": "gso", "general last": "sog", "general between": "sgo"}[order]
        handlers = {"g": general, "s": special, "o": other}
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(hooks(handlers[name], last=name == "g"))
            y = x.exp()
            z = y[:3].exp()
        assert len(special.kept) == 1
        assert [tensor.numel() for tensor in general.kept] == [3]
        z.sum().backward()


def test_the_foreign_pair_is_found_below_handlers():
    assert foreign_pair() is None
    with hooks(Keeper()):
        assert foreign_pair() is None
    foreign = Foreign()
    with foreign.pair(), hooks(Keeper()), hooks(Keeper(), last=True):
        pair = foreign_pair()
        assert pair is not None
        assert pair[0] == foreign.pack


def test_a_handler_pushed_twice_is_asked_once():
    keeper = Keeper(lambda tensor: False)
    with hooks(keeper):
        check_product(product_gradients(hooks(keeper)))
    assert len(keeper.seen) == 2


def test_a_foreign_pair_outside_gets_what_no_handler_wants():
    foreign, keeper = Foreign(), Keeper(lambda tensor: tensor[0] == 2)
    with foreign.pair():
        check_product(product_gradients(hooks(keeper)))
    assert (foreign.packed, foreign.unpacked) == (1, 1)
    assert len(keeper.kept) == 1


def test_a_foreign_pair_inside_wins():
    foreign, keeper = Foreign(), Keeper()
    with hooks(keeper):
        check_product(product_gradients(foreign.pair()))
    assert (foreign.packed, foreign.unpacked) == (2, 2)
    assert not keeper.seen


def test_a_handler_between_foreign_pairs_hands_on_to_the_nearest():
    far, near, keeper = Foreign(), Foreign(), Keeper(lambda tensor: False)
    with far.pair(), near.pair():
        check_product(product_gradients(hooks(keeper)))
    assert (near.packed, far.packed) == (2, 0)


@pytest.mark.parametrize("early_stop", [True, False])
def test_activation_checkpointing_still_recomputes(early_stop):
    weight = torch.tensor([5.0, 7.0], requires_grad=True)
    keeper = Keeper(lambda tensor: tensor.data_ptr() == weight.data_ptr())
    calls = 0

    def compute(value):
        nonlocal calls
        calls += 1
        with hooks(keeper):
            return (value * weight).exp().sin()

    given = torch.tensor([0.2, 0.3], requires_grad=True)
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        checkpoint(compute, given, use_reentrant=False).sum().backward()
    expected = torch.tensor([0.2, 0.3], requires_grad=True)
    (expected * weight.detach()).exp().sin().sum().backward()
    assert given.grad is not None
    assert expected.grad is not None
    assert torch.equal(given.grad, expected.grad)
    assert calls == 2
    assert keeper.kept


def top_of_stack():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def test_the_stack_is_as_before_after_use():
    assert top_of_stack() is None
    with hooks(Keeper()):
        assert top_of_stack() is not None
    assert top_of_stack() is None


def test_what_was_abandoned_is_off_the_stack():
    outside, inside = Foreign().pair(), hooks(Keeper())
    inside.__enter__()
    inside.abandon()
    assert top_of_stack() is None
    outside.__enter__()
    inside = hooks(Keeper())
    inside.__enter__()
    outside.__exit__()  # takes what is on top
    inside.abandon()
    assert top_of_stack() is None
    inside.abandon()
    assert top_of_stack() is None
