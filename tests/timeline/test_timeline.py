"""Records of steps: what counts as what, that nothing is counted twice, and what is said."""

import json
import logging
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorspill import timeline
from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.residency import Residency
from tensorspill.timeline import Endurance, Span, StepRecord, line, recording, span, write_trace
from tensorspill.timeline.advice import advise
from tensorspill.timeline.records import record_step
from tensorspill.timeline.spans import _listeners
from tests.residency.models import Model, Trainer, batches, units_of
from tests.residency.test_residency import make, pool_bytes, scattered


def step(number=1, seconds=1.0, compute=0.8, stall=0.0, transfer=0.5, by_path=None):
    by_path = {"direct": 10**9} if by_path is None else by_path
    return StepRecord(
        number, 0.0, seconds, compute, stall, transfer, transfer, sum(by_path.values()), 0, by_path
    )


# -- spans ---------------------------------------------------------------------------------------


def test_nothing_is_made_while_nobody_records():
    assert span("compute", "a") is span("stall", "b")
    assert _listeners == ()


def test_spans_of_all_threads_are_recorded_and_only_while_it_lasts():
    with span("compute", "before"):
        pass
    with recording() as recorded, recorded.step():
        with span("compute", "outer"), span("stall", "inner"):
            time.sleep(0.001)
        thread = threading.Thread(target=lambda: span("compute", "other").__enter__())
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), span("compute", "raising"):
            raise ZeroDivisionError
    with span("compute", "after"):
        pass
    names = [s.name for s in recorded.timeline().spans]
    assert names == ["inner", "outer", "raising"]
    (record,) = recorded.steps
    assert record.number == 1
    assert 0.001 <= record.stall <= record.seconds
    assert 0 <= record.compute <= record.seconds - record.stall


def test_a_step_that_raises_is_recorded_and_steps_do_not_nest():
    with recording() as recorded:
        with pytest.raises(ZeroDivisionError), recorded.step():
            raise ZeroDivisionError
        with recorded.step(), pytest.raises(UnsupportedError), recorded.step():
            pass
    assert [record.number for record in recorded.steps] == [1, 2]


def test_two_recordings_at_a_time():
    with recording() as outer:
        with recording() as inner, span("compute", "both"):
            pass
        with span("compute", "one"):
            pass
    assert [s.name for s in outer.timeline().spans] == ["both", "one"]
    assert [s.name for s in inner.timeline().spans] == ["both"]


def test_old_spans_are_dropped_and_counted():
    recorded = timeline.Recording(most_spans=3)
    for number in range(5):
        recorded.ended(Span("transfer", str(number), 0.0, 1.0, nbytes=7, written=True))
    found = recorded.timeline()
    assert [s.name for s in found.spans] == ["2", "3", "4"]
    assert found.left_out == 2
    assert found.bytes_written == 35


# -- records -------------------------------------------------------------------------------------


@st.composite
def spans(draw):
    kind = draw(st.sampled_from(["compute", "transfer", "stall"]))
    begin, length = draw(st.integers(-5, 25)), draw(st.integers(0, 12))
    nbytes = draw(st.integers(0, 9)) if kind == "transfer" else 0
    return Span(kind, "x", float(begin), float(begin + length), 0, nbytes, draw(st.booleans()))


@given(st.lists(spans(), max_size=12))
def test_times_are_those_of_a_clock_that_ticks(found):
    record = record_step(1, 0.0, 20.0, found)

    def ticks(kind):
        return {t for s in found if s.kind == kind for t in range(int(s.begin), int(s.end))} & set(
            range(20)
        )

    compute, transfer, stall = ticks("compute"), ticks("transfer"), ticks("stall")
    assert record.compute == len(compute - stall)
    assert record.transfer == len(transfer)
    assert record.stall == len(stall)
    assert record.hidden == len(transfer - stall)
    ended = [s for s in found if s.kind == "transfer" and 0 <= s.end <= 20]
    assert record.nbytes == sum(s.nbytes for s in ended)
    assert record.bytes_written == sum(s.nbytes for s in ended if s.written)
    assert 0 <= record.hidden_pct <= 100


def test_training_from_the_drive_is_recorded(tmp_path):
    model, _ = make(Model)
    with scattered(tmp_path, pool_bytes(model, "two")) as swapper:
        residency = Residency(model, units_of(model), swapper)
        trainer = Trainer(model, residency)
        with recording() as recorded:
            for text in batches(3):
                with recorded.step():
                    trainer.step(text)
            residency.flush()
        moved = residency.statistics()
    found = recorded.timeline()
    assert found.bytes_read == moved.bytes_in
    assert found.bytes_written == moved.bytes_out
    total = found.total()
    assert total.nbytes <= moved.bytes_in + moved.bytes_out
    assert sum(total.by_path.values()) == total.nbytes
    names = {s.name for s in found.spans if s.kind == "compute"}
    assert {"forward blocks.0", "backward blocks.4", "update"} <= names
    computed = [s.name for s in found.spans if s.name.startswith(("forward", "backward"))]
    assert len(computed) == 3 * 2 * 5
    assert all(record.compute > 0 for record in found.steps)


# -- what is made of it --------------------------------------------------------------------------


def test_a_trace_has_everything(tmp_path):
    with recording() as recorded, recorded.step():
        with span("compute", "block"):
            pass
        recorded.ended(
            Span("transfer", "parameters", 1.0, 2.0, nbytes=5, written=True, by_path={"direct": 5})
        )
    write_trace(recorded.timeline(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["step 1", "block"]
    begin, end = (e for e in events if e["ph"] in "be")
    assert (begin["ts"], end["ts"], begin["id"]) == (1e6, 2e6, end["id"])
    assert begin["args"] == {"bytes": 5, "direct": 5}
    lanes = {e["tid"] for e in events if e["ph"] != "M"}
    assert lanes <= {e["tid"] for e in events if e["ph"] == "M"}
    with pytest.raises(BrokenError, match="trace"):
        write_trace(recorded.timeline(), tmp_path / "missing" / "trace.json")


def test_a_step_in_a_line():
    said = line(step(seconds=2.0, compute=1.0, stall=0.5, by_path={"buffered": 1 << 20}))
    assert "[##########!!!!!.....]" in said
    assert "1 MiB buffered" in said
    assert "\n" not in said
    assert "nothing moved" in line(record_step(1, 0.0, 0.0, []))


def test_advice_comes_when_the_drive_bounds_the_job(caplog):
    calm, waiting = step(stall=0.05), step(stall=0.4, transfer=0.9)
    assert advise([calm] * 5) is None
    assert advise([waiting] * 3) is None, "the first step learns the order"
    rate = advise([waiting] * 4)
    assert rate is not None
    assert rate.reason == "rate"
    assert "larger batch" in str(rate)
    order = advise([calm, *[step(stall=0.4, transfer=0.45)] * 3])
    assert order is not None
    assert order.reason == "order"
    path = advise([calm, *[step(stall=0.4, transfer=0.9, by_path={"buffered": 10**9})] * 3])
    assert path is not None
    assert path.reason == "path"
    recorded = timeline.Recording()
    recorded.steps += [waiting] * 4
    with caplog.at_level(logging.WARNING, "tensorspill"):
        recorded._warn()
        recorded._warn()
    assert len(caplog.records) == 1


def test_what_writing_means_for_a_drive():
    endurance = Endurance.of("100TB", written="40TB")
    wear = endurance.after(10 * 10**12, 86400.0)
    assert wear.used_pct == pytest.approx(10)
    assert wear.left_bytes == 50 * 10**12
    assert wear.days_left == pytest.approx(5)
    assert "10.000 TB written" in str(wear)
    assert "5.0 days" in str(wear)
    assert Endurance.of_daily_writes("1TB", 1, years=5).nbytes == 1825 * 10**12
    assert endurance.after(0, 1.0).days_left == float("inf")
    assert "for ever" in str(endurance.after(0, 1.0))
    assert endurance.after(10**14, 1.0).left_bytes == 0
    for wrong in (lambda: Endurance.of(0), lambda: Endurance.of_daily_writes("1TB", 0)):
        with pytest.raises(UnsupportedError):
            wrong()
    with recording(endurance=endurance) as recorded:
        recorded.ended(Span("transfer", "x", 0.0, 1.0, nbytes=5, written=True))
    worn = recorded.wear()
    assert worn is not None
    assert worn.nbytes == 5
    assert timeline.Recording().wear() is None


def test_nvtx_is_refused_where_torch_has_no_cuda():
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA")
    with pytest.raises(UnsupportedError, match="CUDA"), recording(nvtx=True):
        pass


@pytest.mark.gpu
def test_nvtx_ranges_are_balanced():
    torch.cuda.init()
    with recording(nvtx=True) as recorded, recorded.step(), span("compute", "marked"):
        pass
    assert len(recorded.steps) == 1
