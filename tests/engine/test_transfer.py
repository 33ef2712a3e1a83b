import gc
import threading
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial

import pytest

from tensorspill.engine import Transfer, TransferRecord, gather


def ended(nbytes: int = 10, error: BaseException | None = None) -> Transfer:
    transfer = Transfer(nbytes)
    transfer.end(error or TransferRecord(nbytes, 0.5, {"direct": nbytes}))
    return transfer


def test_a_gathered_transfer_sums_its_parts():
    record = gather([ended(10), ended(20)]).result(10)
    assert (record.nbytes, record.seconds, record.by_path) == (30, 0.5, {"direct": 30})
    assert gather([]).result(10).nbytes == 0


def test_a_gathered_transfer_ends_when_all_have():
    late = Transfer(1)
    whole = gather([ended(error=OSError("first")), late])
    assert not whole.done()
    late.end(TransferRecord(1, 0.1, {}))
    with pytest.raises(OSError, match="first"):
        whole.result(10)


def test_finish_runs_before_the_end_and_has_the_last_word():
    seen = []

    def finish(error: BaseException | None) -> BaseException | None:
        seen.append((error, whole_done()))
        return ValueError("mine")

    part = Transfer(1)
    whole = gather([part], finish)

    def whole_done() -> bool:
        return whole.done()

    part.end(TransferRecord(1, 0.1, {}))
    assert seen == [(None, False)]
    with pytest.raises(ValueError, match="mine"):
        whole.result(10)


def test_a_finish_that_raises_ends_the_transfer():
    def finish(error: BaseException | None) -> BaseException | None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        gather([ended()], finish).result(10)


def test_finish_may_run_elsewhere():
    threads = []
    with ThreadPoolExecutor(1) as executor:

        def finish(error: BaseException | None) -> BaseException | None:
            threads.append(threading.current_thread())
            return error

        gather([ended()], finish, executor.submit).result(10)
    assert threads[0] is not threading.current_thread()


def test_cancelling_a_gathered_transfer_cancels_its_parts():
    stopped: list[int] = []
    parts = [Transfer(1, partial(stopped.append, i)) for i in range(3)]
    whole = gather(parts)
    parts[0].end(TransferRecord(1, 0.1, {}))
    assert whole.cancel()
    assert stopped == [1, 2]
    for part in parts[1:]:
        part.end(CancelledError())
    assert whole.cancelled()
    assert not whole.cancel()


def test_the_first_error_stops_the_other_parts():
    stopped = []
    slow = Transfer(1, lambda: stopped.append(True))
    failing = Transfer(1)
    whole = gather([slow, failing])
    failing.end(OSError("drive gone"))
    assert stopped
    slow.end(CancelledError())
    with pytest.raises(OSError, match="drive gone"):
        whole.result(10)


def test_nothing_is_held_after_the_end():
    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)
    part = Transfer(1)
    part.on_cancel(partial(print, memory))
    whole = gather([part], partial(lambda _, error: error, memory))
    del memory
    assert gone() is not None
    gc.disable()
    try:
        part.end(TransferRecord(1, 0.1, {}))
        del part
        assert gone() is None
    finally:
        gc.enable()
    assert whole.result(10).nbytes == 1
