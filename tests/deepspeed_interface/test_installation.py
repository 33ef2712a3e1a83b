"""Installing into DeepSpeed, and taking it back; in children, since it changes their modules."""

import importlib.util
import subprocess
import sys

import pytest

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def child(code: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
def test_builders_load_our_operators_and_theirs_again() -> None:
    child("""
from tensorspill import deepspeed as ours
from deepspeed.ops.op_builder.builder import OpBuilder
before = dict(OpBuilder._loaded_ops)
ours.install(swapper=True, writers=True)
ours.install(swapper=True, writers=True)
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
from deepspeed.ops.op_builder.gds import GDSBuilder
for builder in (AsyncIOBuilder, GDSBuilder, PinMemoryBuilder):
    assert builder().is_compatible(), builder
assert AsyncIOBuilder().load().aio_handle is ours.AioHandle
assert GDSBuilder().load(verbose=False).gds_handle is ours.GdsHandle
example = __import__("torch").zeros(1)
tensor = PinMemoryBuilder().load().pin_handle().new_cpu_locked_tensor(10, example)
assert ours.AioHandle().is_pinned(tensor)
from deepspeed.runtime.swap_tensor import partitioned_param_swapper as swapping
from deepspeed.runtime.zero import partition_parameters
assert swapping.AsyncPartitionedParameterSwapper is ours.AsyncPartitionedParameterSwapper
used = partition_parameters.AsyncPartitionedParameterSwapper
assert used is ours.AsyncPartitionedParameterSwapper
from deepspeed.runtime.model_checkpointing import utils
assert issubclass(utils.DataParallelWriterFactory, ours.DataParallelWriterFactory)
ours.uninstall()
assert OpBuilder._loaded_ops == before
assert swapping.AsyncPartitionedParameterSwapper is not ours.AsyncPartitionedParameterSwapper
assert utils.DataParallelWriterFactory is not ours.DataParallelWriterFactory
assert AsyncIOBuilder.load.__module__.startswith("deepspeed")
""")


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
@pytest.mark.thorough
def test_a_release_that_was_not_tried_is_refused() -> None:
    child("""
import importlib.metadata
from tensorspill import deepspeed as ours
from tensorspill.errors import UnsupportedError
from tensorspill.deepspeed import installation
installation.SUPPORTED = ((0, 1), (0, 2))
try:
    ours.install()
except UnsupportedError as error:
    assert "was not tried" in str(error)
else:
    raise SystemExit("not refused")
ours.install(any_version=True)
""")


def test_importing_needs_no_deepspeed() -> None:
    child("""
import sys
sys.modules["deepspeed"] = None
import tensorspill.deepspeed
""")


@pytest.mark.thorough
def test_without_deepspeed_it_says_so() -> None:
    child("""
import importlib.metadata as metadata
from tensorspill import deepspeed as ours
from tensorspill.errors import UnsupportedError
class Nothing(metadata.DistributionFinder):
    def find_distributions(self, context=None):
        return iter(())
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, "find_distributions")] + [Nothing()]
try:
    ours.install()
except UnsupportedError as error:
    assert "not installed" in str(error)
else:
    raise SystemExit("not refused")
""")
