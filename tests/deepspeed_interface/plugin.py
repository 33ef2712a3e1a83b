"""A pytest plugin that runs DeepSpeed's own tests on this library's engines."""

from tensorspill import deepspeed

deepspeed.install(any_version=True)
