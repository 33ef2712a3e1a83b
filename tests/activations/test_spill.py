"""What an activation spill takes and leaves, how it ends, and what happens when something fails."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tensorspill.activations import ActivationSpill, activation_spill
from tensorspill.errors import (
    BrokenError,
    CapacityError,
    ClosedError,
    CorruptError,
    UnsupportedError,
)
from tests.activations.helpers import check_free, gradients, same, spilling
from tests.faults import Rule, faulty_file_system


def fresh(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def chain(x, length=8):
    for _ in range(length):
        x = x.sin() * x.cos()
    return x.square().sum()


# -- what is taken -----------------------------------------------------------------------------


def test_parameters_and_their_views_are_left(tmp_path):
    linear = nn.Linear(40, 40)
    x = torch.randn(5, 40, requires_grad=True)
    with spilling(tmp_path) as spill:
        with spill:
            # Saves the input, a leaf as parameters are; the weight, its transpose, and a slice.
            loss = (linear(x * 1) @ linear.weight[:20].t()).sum()
        statistics = spill.statistics()
        assert statistics.left >= 2
        assert statistics.live_bytes == 2 * 5 * 40 * 4
        loss.backward()
        del loss


def test_memory_is_stored_once(tmp_path):
    x = fresh(30, 120)
    with spilling(tmp_path) as spill:
        with spill:
            y = x * 1
            queries, keys, values = y.chunk(3, 1)
            loss = (queries * keys * values).sum() + (y * y.view(-1).view(30, 120)).sum()
            loss = loss + y.exp().log().sum()
        statistics = spill.statistics()
        # y and the product of two chunks, the exponential; and no more.
        assert statistics.live_bytes == (2 * 30 * 120 + 30 * 40) * 4
        assert statistics.tensors > statistics.ranges == 3
        del y, queries, keys, values
        found = gradients(loss, [x])
        y = x * 1
        q, k, v = y.chunk(3, 1)
        expected = (q * k * v).sum() + (y * y.view(-1).view(30, 120)).sum() + y.exp().log().sum()
        assert same(found, gradients(expected, [x]))
        del loss


def test_changed_memory_is_stored_anew(tmp_path):
    x = fresh(50)
    with spilling(tmp_path) as spill:
        with spill:
            y = x * 1
            first = y * torch.ones(50)  # saves the ones alone
            z = y.sin()  # saves y
            y = y.detach()
            y.mul_(2)
            second = x * y
        assert torch.equal(torch.autograd.grad(second.sum(), [x])[0], y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(z.sum(), [x])
        del first, second, z


@pytest.mark.parametrize("view", [False, True])
def test_changes_in_place_are_found_out(view, tmp_path):
    def run():
        x = fresh(50)
        y = x.exp()
        (y[:10] if view else y).add_(1)
        return y.sum().backward

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run()()
    with spilling(tmp_path) as spill:
        with spill:
            backward = run()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward()
        del backward


def test_small_tensors_are_left(tmp_path):
    with spilling(tmp_path, min_bytes=1000) as spill:
        with spill:
            small, large = fresh(249).exp(), fresh(250).exp()
        assert spill.statistics().ranges == 1
        expanded = fresh(1)
        with spill:
            wide = (expanded * 1).expand(5000) * (fresh(1) * 1).expand(5000)
        assert spill.statistics().ranges == 1
        del small, large, wide


def test_without_gradients_nothing_is_taken(tmp_path):
    with spilling(tmp_path) as spill:
        with spill, torch.no_grad():
            chain(fresh(100))
        with spill, torch.inference_mode():
            chain(fresh(100))
        assert spill.statistics().tensors == 0


def test_what_others_keep_is_not_spilled_again(tmp_path):
    table, x = torch.randn(40, 40), fresh(40, 40)
    with spilling(tmp_path) as spill:
        for _ in range(3):
            with spill:
                loss = (x * table).sum()
            spill._traffic.writing.finish()  # so that it is not taken from memory as it is anyway
            assert torch.equal(gradients(loss, [x])[0], table)
            del loss
        statistics = spill.statistics()
        assert statistics.ranges == 1
        assert statistics.bytes_in == 0


# -- how long it lives -------------------------------------------------------------------------


def test_a_graph_that_is_dropped_gives_its_room_back(tmp_path):
    with spilling(tmp_path) as spill:
        for wait in (True, False):
            with spill:
                loss = chain(fresh(2000))
            if wait:
                spill._traffic.writing.finish()
            assert spill.statistics().live_bytes > 0
            del loss
            check_free(spill)


def test_an_exception_in_forward_and_in_backward(tmp_path):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x.exp())
            return x.exp()

        @staticmethod
        def backward(context, gradient):
            _ = context.saved_tensors
            raise ArithmeticError("as asked for")

    with spilling(tmp_path) as spill:
        with pytest.raises(ArithmeticError), spill:
            raise ArithmeticError(str(chain(fresh(500))))
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        check_free(spill)
        x = fresh(500)
        with spill:
            loss = chain(Failing.apply(chain(x, 1) * x))
        with pytest.raises(ArithmeticError):
            loss.backward()
        del loss
        check_free(spill)
        with spill:
            loss = chain(x)
        assert same(gradients(loss, [x]), gradients(chain(x), [x]))
        del loss


def test_several_times_through_one_graph(tmp_path):
    x = fresh(400, 5)
    with spilling(tmp_path, budget="32KiB") as spill:
        with spill:
            loss = chain(x)
        expected = gradients(chain(x), [x])
        for keep in (True, True, False):
            assert same(gradients(loss, [x], retain_graph=keep), expected)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        del loss


def test_several_graphs_at_once(tmp_path):
    x = fresh(400, 5)
    with spilling(tmp_path, budget="32KiB") as spill:
        losses = []
        for factor in range(3):
            with spill:
                losses.append(chain(x * factor))
        for factor in (1, 0, 2):
            assert same(gradients(losses[factor], [x]), gradients(chain(x * factor), [x]))
        losses.clear()


def test_nested(tmp_path):
    x = fresh(600)
    with (
        spilling(tmp_path / "a", min_bytes=100) as outer,
        spilling(tmp_path / "b", min_bytes=2000) as inner,
    ):
        with outer, inner:
            loss = chain(x[:30] * 2, 1) + chain(x * 2)
        with inner, outer, inner:
            more = chain(x * 2)
        assert outer.statistics().tensors > 0
        assert inner.statistics().tensors > 0
        expected = gradients(chain(x[:30] * 2, 1) + 2 * chain(x * 2), [x])
        found = gradients(loss, [x])[0] + gradients(more, [x])[0]
        assert torch.allclose(found, expected[0])
        del loss, more


def test_foreign_hooks(tmp_path):
    """Those inside win, as torch has it; those outside get what is left."""
    seen = []

    def note(tensor):
        seen.append(tensor.numel())
        return tensor

    x = fresh(600)
    with spilling(tmp_path, min_bytes=2000) as spill:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), spill:
            loss = chain(x * 1) + chain(x[:30] * 1)
        assert set(seen) <= {30, 1}
        with spill, torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            more = chain(x * 1)
        assert 600 in seen
        (loss + more).backward()
        del loss, more


def test_threads(tmp_path):
    """Each thread's forward is its own; the drive and the memory are shared."""
    barrier = threading.Barrier(3, timeout=30)

    def work(seed):
        x = fresh(3000, seed=seed)
        found = []
        for _ in range(3):
            barrier.wait()
            with spill:
                loss = chain(x)
            found.append(gradients(loss, [x])[0])
        return x, found

    with spilling(tmp_path, budget="64KiB") as spill:
        with ThreadPoolExecutor(3) as executor:
            results = list(executor.map(work, range(3)))
        for x, found in results:
            expected = gradients(chain(x), [x])[0]
            assert all(torch.equal(one, expected) for one in found)
        x = fresh(100)
        chain(x).backward()
        del results


def test_closing(tmp_path):
    x = fresh(3000)
    spill = activation_spill(tmp_path, min_bytes=1, budget="64KiB")
    with spill:
        loss = chain(x)
    spill.close()
    spill.close()
    with pytest.raises(ClosedError):
        loss.backward()
    with pytest.raises(ClosedError), spill:
        pass
    assert spill.statistics().tensors > 0
    assert not any(path.is_file() and path.suffix == ".spill" for path in tmp_path.rglob("*"))


def test_dropped_without_closing(tmp_path):
    x = fresh(3000)
    with activation_spill(tmp_path, min_bytes=1, budget="64KiB"):
        loss = chain(x)
    assert same(gradients(loss, [x]), gradients(chain(x), [x]))
    del loss
    gc.collect()
    assert not any(path.suffix == ".spill" for path in tmp_path.rglob("*"))


def test_bad_arguments(tmp_path):
    with pytest.raises(UnsupportedError):
        activation_spill(tmp_path, budget="much")
    with pytest.raises(UnsupportedError):
        activation_spill(tmp_path, colour="red")
    with pytest.raises(UnsupportedError):
        activation_spill(tmp_path, backend="tape")
    assert not any(tmp_path.rglob("*.spill"))


def test_memory_stays_within_the_budget(tmp_path):
    x = fresh(20_000)
    with spilling(tmp_path, budget="400KiB") as spill:
        for _ in range(2):
            with spill:
                loss = chain(x, 30)
            statistics = spill.statistics()
            assert statistics.live_bytes > 4 * spill.budget
            assert statistics.most_held_bytes <= spill.budget // 2
            loss.backward()
            assert spill.statistics().pool.peak_allocated <= spill.budget // 2
            del loss
        assert spill.statistics().ahead + spill.statistics().awaited > 0


def test_a_budget_that_suffices_keeps_all_in_memory(tmp_path):
    x = fresh(2000)
    with spilling(tmp_path, budget="1MiB") as spill:
        with spill:
            loss = chain(x)
        statistics = spill.statistics()
        assert statistics.held_bytes == statistics.live_bytes > 0
        assert same(gradients(loss, [x]), gradients(chain(x), [x]))
        statistics = spill.statistics()
        assert statistics.bytes_out == statistics.bytes_in == 0
        assert statistics.from_memory == statistics.tensors
        del loss


def test_what_backward_needs_first_is_not_written(tmp_path):
    x = fresh(500)
    with spilling(tmp_path, budget="200KiB") as spill:
        for _ in range(2):
            with spill:
                loss = chain(x, 100)
            before = spill.statistics()
            assert same(gradients(loss, [x]), gradients(chain(x, 100), [x]))
            del loss
            statistics = spill.statistics()
            assert before.held_bytes > spill.budget // 4
            assert statistics.bytes_in <= statistics.bytes_out
        assert 0 < statistics.bytes_out < 2 * (before.live_bytes - spill.budget // 4)
        # Small ones move together.
        assert statistics.file.puts < statistics.bytes_out / 4000
        assert statistics.file.gets < statistics.bytes_in / 4000


# -- what can fail -----------------------------------------------------------------------------


def test_a_drive_that_fails(tmp_path):
    x = fresh(3000)
    with faulty_file_system(tmp_path) as drive, spilling(drive.folder, budget="64KiB") as spill:
        expected = gradients(chain(x), [x])
        with spill:
            loss = chain(x)
        spill._traffic.writing.finish()

        drive.rules(Rule("*.spill", "read", error=errno.EIO))
        with pytest.raises(BrokenError) as caught:
            gradients(loss, [x], retain_graph=True)
        assert caught.value.errno == errno.EIO
        drive.rules()
        assert same(gradients(loss, [x]), expected)
        del loss, caught  # which refers to frames, and they to the graph

        drive.rules(Rule("*.spill", "write", error=errno.EIO))
        with pytest.raises(BrokenError), spill:
            _written(spill, chain(x))
        drive.rules()
        check_free(spill)
        with spill:
            loss = chain(x)
        assert same(gradients(loss, [x]), expected)
        del loss


def _written(spill, result):
    spill._traffic.writing.finish()
    return result


def test_a_write_that_fails_at_the_end_loses_nothing(tmp_path):
    x = fresh(3000)
    with faulty_file_system(tmp_path) as drive, spilling(drive.folder) as spill:
        drive.rules(Rule("*.spill", "write", error=errno.EIO))
        losses = []
        with pytest.raises(BrokenError), spill:
            losses.append(_written(spill, x.exp().sum()))
        assert torch.equal(gradients(losses[0], [x])[0], x.exp())
        losses.clear()
        drive.rules()


def test_a_full_file(tmp_path):
    x = fresh(3000)
    with spilling(tmp_path, capacity="40KiB") as spill:
        with pytest.raises(CapacityError), spill:
            chain(x)
        check_free(spill)
        with spill:
            loss = x.exp().sum()
        assert torch.equal(gradients(loss, [x])[0], x.exp())
        del loss


def test_bytes_that_changed_on_the_drive(tmp_path):
    x = fresh(3000)
    with spilling(tmp_path, verify=True) as spill:
        with spill:
            loss = x.exp().sum()
        spill._traffic.writing.finish()
        (name,) = spill._traffic.file
        path, offset, _ = spill._traffic.file.location(name)[0]
        with open(path, "r+b") as file:
            file.seek(offset + 100)
            file.write(b"\x7f\x7f")
            os.fsync(file.fileno())
        with pytest.raises(CorruptError):
            loss.backward()
        del loss


def test_a_forked_child_keeps_off(tmp_path):
    x = fresh(3000)
    with spilling(tmp_path) as spill:
        with spill:
            loss = chain(x)

        pid = os.fork()
        if pid == 0:
            try:
                with spill:
                    chain(fresh(500))
            except ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert same(gradients(loss, [x]), gradients(chain(x), [x]))
        del loss


@pytest.mark.thorough
def test_interrupted_anywhere(tmp_path):
    """Ctrl-C at random moments: the next step is right, and nothing is lost."""
    x = fresh(3000)
    expected = gradients(chain(x), [x])
    with spilling(tmp_path, budget="64KiB") as spill:
        interrupted = 0
        for delay in range(0, 40, 2):
            timer = threading.Timer(delay / 4000, lambda: os.kill(os.getpid(), signal.SIGINT))
            loss = None
            try:
                timer.start()
                while timer.is_alive() or loss is None:
                    with spill:
                        loss = chain(x)
                    assert same(gradients(loss, [x]), expected)
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            timer.cancel()
            timer.join()
            del loss
            gc.collect()
        assert interrupted
        with spill:
            loss = chain(x)
        assert same(gradients(loss, [x]), expected)
        del loss


@pytest.mark.thorough
def test_importing_is_cheap():
    program = (
        "import sys, threading, tensorspill.activations\n"
        "assert 'numba' not in sys.modules and threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_context_says_what_it_is(tmp_path):
    with spilling(tmp_path) as spill:
        assert isinstance(spill, ActivationSpill)
        with spill as entered:
            assert entered is spill
