"""Job files of torchtitan, of 2024 and of 2026."""

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.torchtitan.spec import import_torchtitan

OLD = """
[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
batch_size = 16
seq_len = 8192
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
compile = true
[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
enable_float8_linear = true
enable_fsdp_float8_all_gather = true
"""
NEW = """
[model]
name = "qwen3"
flavor = "1.7B"
converters = ["quantize.linear.float8"]
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
[compile]
enable = true
[quantize.linear.float8]
recipe_name = "rowwise"
filter_fqns = ["output"]
"""


def spec_of(text, **more):
    """The spec of a job file."""
    return import_torchtitan(text, "job.toml", **more).loaded.spec


def codes(text, **more):
    """Codes of the errors of a job that is refused, and their text."""
    with pytest.raises(MegaplanError) as caught:
        import_torchtitan(text, "job.toml", **more)
    return [found.code for found in caught.value.diagnostics], str(caught.value.diagnostics)
