"""Rules of host torchtitan: its keys, and the parts of a spec that it cannot run."""

import pytest

from megaplan.errors import MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec_text

SPEC = """
format: megaplan.spec/1
name: small
model:
  pattern: AD
  num_layers: 12
  hidden_size: 256
  vocab_size: 4096
  attention: {kind: gqa, num_heads: 8, num_kv_heads: 4, head_dim: 32}
  mlp: {ffn_hidden_size: 640, activation: swiglu}
mesh: {dp_shard: 4}
batch: {micro_batch_size: 2, seq_length: 128}
optimizer: {matrix: adamw}
host: {name: torchtitan}
"""


def refused(*overrides):
    with pytest.raises(MegaplanError) as caught:
        load_spec_text(SPEC, "small.yaml", overrides)
    return [(found.code, found.location.key) for found in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("model.pattern=DA",), "model.pattern"),
        (("model.pattern=AAD",), "model.pattern"),
        (("model.attention.window_size=64",), "model.attention.window_size"),
        (("model.attention.bias=true",), "model.attention.bias"),
        (("model.mlp.activation=relu2",), "model.mlp.activation"),
        (("model.norm=layernorm",), "model.norm"),
        (("data.packing=documents",), "data.packing"),
        (("mesh.tp=2",), "mesh.vocab_parallel"),
        (("mesh.tp=8", "mesh.vocab_parallel=true", "model.attention.num_heads=16"), "mesh.tp"),
        (("mesh={dp_replicate: 4}",), "mesh.dp_replicate"),
        (("precision.grads=bf16", "precision.reduce=bf16"), "precision.grads"),
        (("precision.reduce=fp16",), "precision.reduce"),
        (("precision.master=bf16", "precision.grads=bf16"), "precision.moments"),
        (("precision.families={D: fp32}",), "precision.families.D"),
        (("precision.recipe={name: fp8_rowwise, param_gather: true}",), "precision.recipe"),
        (("precision.recipe={name: fp8_current, head: true}",), "precision.recipe"),
        (("optimizer.matrix=muon",), "optimizer.matrix"),
        (("recompute.blocks={A: full}",), "recompute.blocks"),
        (("mesh={pp: 2, dp_shard: 2}", "schedule.num_microbatches=4", "schedule.steps_per_update=2"), "schedule.steps_per_update"),
        (("mesh={pp: 2, dp_shard: 2}", "schedule.num_microbatches=4", "model.tie_embeddings=true"), "model.tie_embeddings"),
        (
            ("mesh={pp: 2, dp_shard: 2}", "schedule.num_microbatches=4", "split={mode: manual, reason: test, spans: [[0, 5], [5, 12]]}"),
            "split.spans",
        ),
    ],
)
def test_what_it_cannot_run_is_named(overrides, key):
    assert ("MP902", key) in refused(*overrides)


def test_keys_of_other_hosts_are_refused_with_their_host():
    assert ("MP901", "host.kernels") in refused("host.kernels=triton")
    assert ("MP901", "host.attention_backend") in refused("host.attention_backend=fused")
    assert ("MP901", "host.compile_model") in refused("host={name: megatron, compile_model: true}")


def test_chosen_cuts_are_between_blocks():
    overrides = ("mesh={pp: 4, dp_shard: 1}", "schedule.num_microbatches=4")
    spec = load_spec_text(SPEC, "small.yaml", overrides).spec
    spans = choose_cuts(spec, build_inventory(spec)).spans
    assert len(spans) == 4
    assert all(start % 2 == 0 for start, _ in spans)


@pytest.mark.parametrize("capacity", [4_000_000, 6_000_000, 12_000_000])
def test_where_nothing_fits_the_closest_cuts_are_between_blocks_too(capacity):
    overrides = ("mesh={pp: 4, dp_shard: 1}", "schedule.num_microbatches=4", f"device.capacity={capacity}")
    spec = load_spec_text(SPEC, "small.yaml", (*overrides, "device.reserve={cuda_context: 0, nccl: 0, driver: 0}")).spec
    cuts = choose_cuts(spec, build_inventory(spec))
    assert [item.code for item in cuts.diagnostics if item.code == "MP501"] == ["MP501"]
    assert all(start % 2 == 0 for start, _ in cuts.spans)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_equal_cuts_are_between_blocks(pp):
    overrides = (f"mesh={{pp: {pp}, dp_shard: 1}}", "schedule.num_microbatches=4", "split.mode=equal")
    spec = load_spec_text(SPEC, "small.yaml", overrides).spec
    cuts = choose_cuts(spec, build_inventory(spec))
    sizes = [stop - start for start, stop in cuts.spans]
    assert all(size % 2 == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= 2


def test_a_document_has_the_hosts_own_keys_alone():
    host = load_spec_text(SPEC, "small.yaml", ()).spec.as_document()["host"]
    assert set(host) == {
        "name", "compile_model", "compile_loss", "checkpoint_every", "repeat_kv", "fsdp_ends", "async_tensor_parallel",
        "keep_pipeline_outputs", "foreach_optimizer", "reserved_percent",
    }  # fmt: skip
