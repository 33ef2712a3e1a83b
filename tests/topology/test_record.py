"""Records: unknown fields have reasons, and JSON reads back equal."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.errors import UnsupportedError
from tensorspill.topology import Gpu, Machine, NumaNode, NvLink
from tensorspill.topology.machines import machine, names
from tensorspill.topology.record import NOT_STATED
from tests.topology.trees import machines


def test_every_unknown_field_has_a_reason():
    gpu = Gpu(bdf="0000:01:00.0", unknown=(("uuid", "no driver"), ("bdf", "dropped, it is known")))
    assert gpu.why("uuid") == "no driver"
    assert gpu.why("numa_node") == NOT_STATED
    assert gpu.why("bdf") == ""
    assert {name for name, _ in gpu.unknown} == {
        "index", "uuid", "parent", "numa_node", "memory_node", "memory_bytes", "link_mbps",
    }  # fmt: skip


def test_reasons_do_not_depend_on_their_order():
    one = NumaNode(index=0, unknown=(("socket", "a"), ("memory_bytes", "b")))
    other = NumaNode(index=0, unknown=(("memory_bytes", "b"), ("socket", "a")))
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize("name", names())
def test_known_machines_read_back_equal(name):
    original = machine(name)
    assert Machine.parse(original.dump()) == original
    assert Machine.parse(original.dump()).dump() == original.dump()


@given(machines())
def test_any_machine_reads_back_equal(original):
    assert Machine.parse(original.dump()) == original


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ('{"gpus": [{"index": "0"}]}', r"Machine\.gpus\[0\]\.index must be int"),
        ('{"gpus": [{"index": true}]}', r"Machine\.gpus\[0\]\.index must be int"),
        ('{"gpus": {}}', r"Machine\.gpus must be a JSON array"),
        ('{"gpus": [7]}', r"Machine\.gpus\[0\] must be a JSON object"),
        ('{"gpu": []}', "Machine has unknown fields: gpu"),
        ('{"gpus": [{"nvlinks": [{"count": 1}]}]}', r"nvlinks\[0\] lacks the field peer"),
        ('{"unknown": [["a"]]}', r"Machine\.unknown\[0\] must have 2 items"),
        ("[]", "Machine must be a JSON object"),
        ("{", "not JSON"),
        ("[" * 10**5, "not JSON"),
        ('{"nodes": [{"index": 1}, {"index": 1}]}', "Two records of one NUMA node: 1"),
    ],
)
def test_other_json_is_refused_by_name(value, field):
    with pytest.raises(UnsupportedError, match=field):
        Machine.parse(value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["gpus", "nodes", "index", "unknown"]),
                                      inner, max_size=3), max_leaves=8))  # fmt: skip
def test_any_json_is_a_machine_or_refused(value):
    try:
        Machine.parse(json.dumps(value))
    except UnsupportedError:
        pass


def test_names_are_unique():
    with pytest.raises(UnsupportedError, match="Two records of one GPU: 0000:01"):
        Machine(gpus=(Gpu(bdf="0000:01:00.0"), Gpu(bdf="0000:01:00.0", index=1)))


def test_nested_records_are_part_of_equality():
    one = Gpu(bdf="0000:01:00.0", nvlinks=(NvLink(peer="nvswitch", count=18),))
    assert one != Gpu(bdf="0000:01:00.0", nvlinks=(NvLink(peer="nvswitch", count=12),))
