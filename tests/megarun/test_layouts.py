"""Every layout trains as one process does: same start, same gradients, same losses, same parameters."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.runtime
STEPS = 4
DATA_AXES, BITWISE, OTHER = 2e-6, 0.0, 1e-5  # max|a − b| / max|b|, per tensor, fp32
CUT = [[0, 3], [3, 5]]
HYBRID = {"model.pattern": "DRAMEA", "model.num_layers": 6}
RECOMPUTED = {"recompute": {"default": "full", "blocks": {"M": "selective", "E": "selective"}}}
INTERLEAVED = {"mesh": {"pp": 2, "vpp": 2}, "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 4}}
FOUR_SLOTS = [[0, 1], [1, 3], [3, 4], [4, 6]]
FOUR_OF_FIVE = [[0, 1], [1, 2], [2, 3], [3, 5]]


def case(name: str, spec: dict[str, Any], spans: list[list[int]]) -> dict[str, Any]:
    return {"name": name, "spec": spec, "spans": spans, "steps": STEPS}


def merged(records: list[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    """The tensors of all ranks by name; ranks that hold the same tensor must agree to the bit."""
    whole: dict[str, torch.Tensor] = {}
    for record in records:
        for name, tensor in record[key].items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), f"{key}: ranks disagree on {name}"
    return whole


def distance(records: list[dict[str, Any]], reference: dict[str, Any], key: str) -> float:
    """The parity metric's worst tensor."""
    found, expected = merged(records, key), reference[key]
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-30)) for name, tensor in expected.items())


def check(records: list[dict[str, Any]], reference: dict[str, Any], tolerance: float) -> None:
    assert distance(records, reference, "initial") == 0
    assert distance(records, reference, "gradients") <= tolerance
    for record in records:
        pairs = zip(record["losses"], reference["losses"], strict=True)
        assert max(abs(loss - expected) / expected for loss, expected in pairs) <= tolerance
        assert record["losses"] == records[0]["losses"]
    assert distance(records, reference, "parameters") <= (0 if tolerance == BITWISE else OTHER)


@pytest.mark.requirement("R-63")
@pytest.mark.requirement("R-55")
def test_two_ranks_train_as_one_process(one_process: Any, worker: Any, run_layouts: Any, spec_with: Any) -> None:
    """Pipeline stages are equal to the bit, data ranks to the rounding of a sum; with and without resharding after forward."""
    four, two = {"schedule.num_microbatches": 4}, {"schedule.num_microbatches": 2}
    mla = {
        "model.pattern": "AEAM",
        "model.num_layers": 4,
        "model.attention": {
            "kind": "mla",
            "num_heads": 2,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "nope_layers": [2],
        },
    }
    reshard = {"sharding.reshard_after_forward": True}
    cases = [
        case("pp", spec_with({**four, "mesh": {"pp": 2}}), CUT),
        case("pp-reshard", spec_with({**four, **reshard, "mesh": {"pp": 2}}), CUT),
        case("dp", spec_with({**two, "mesh": {"dp_shard": 2}}), [[0, 5]]),
        case("dp-reshard", spec_with({**two, **reshard, "mesh": {"dp_shard": 2}}), [[0, 5]]),
        case("hsdp", spec_with({**two, "mesh": {"dp_replicate": 2}}), [[0, 5]]),
        case("mla-pp", spec_with({**four, **mla, "mesh": {"pp": 2}}), [[0, 2], [2, 4]]),
        case("mla-dp", spec_with({**two, **mla, "mesh": {"dp_shard": 2}}), [[0, 4]]),
        {"name": "muon"},
    ]
    found = run_layouts(2, cases)
    one = worker.train_case(case("one", spec_with(four), [[0, 5]]))
    mla_one = worker.train_case(case("one", spec_with({**four, **mla}), [[0, 4]]))
    for name in ("pp", "pp-reshard"):
        check(found[name], one, BITWISE)
    for name in ("dp", "dp-reshard", "hsdp"):
        check(found[name], one, DATA_AXES)
    check(found["mla-pp"], mla_one, BITWISE)
    check(found["mla-dp"], mla_one, DATA_AXES)
    assert one["losses"][-1] < one["losses"][0]
    assert found["dp"][0]["resident_bytes"] < one["resident_bytes"]
    for record in found["muon"]:
        assert all(torch.equal(a, b) for a, b in zip(record["whole"], record["sharded"], strict=True))


@pytest.mark.requirement("R-19")
def test_experts_without_tokens_still_reduce(one_process: Any, worker: Any, run_layouts: Any, spec_with: Any) -> None:
    """Four tokens reach at most four of sixteen experts; the others get zero gradients, and ranks whose experts differ stay in step."""
    sparse = {"model.moe.num_experts": 16, "model.moe.top_k": 1, "batch": {"micro_batch_size": 1, "seq_length": 4}}
    found = run_layouts(2, [case("sparse", spec_with({**sparse, "mesh": {"dp_shard": 2}}), [[0, 5]])])
    one = worker.train_case(case("one", spec_with({**sparse, "schedule.num_microbatches": 2}), [[0, 5]]))
    check(found["sparse"], one, DATA_AXES)
    idle = one["gradients"]["layers.2.experts.up_proj"].flatten(1).abs().amax(1) == 0
    assert int(idle.sum()) >= 16 - 8


@pytest.mark.requirement("R-62")
@pytest.mark.requirement("R-8")
def test_tied_embeddings_and_bf16_over_two_stages(one_process: Any, worker: Any, run_layouts: Any, spec_with: Any) -> None:
    """The two copies of a tied embedding stay equal; their gradient is summed in another order than one process's, so not to the bit."""
    four = {"schedule.num_microbatches": 4}
    bf16 = {**four, "precision.params": "bf16"}
    tied = {**four, "model.tie_embeddings": True}
    narrow = {"precision.grads": "bf16", "precision.reduce": "bf16"}
    cases = [
        case("tied", spec_with({**tied, "mesh": {"pp": 2}}), CUT),
        case("bf16", spec_with({**bf16, "mesh": {"pp": 2}}), CUT),
        case("bf16-grads", spec_with({**bf16, **narrow, "mesh": {"pp": 2}}), CUT),
        case("bf16-grads-vpp", spec_with({**bf16, **narrow, **INTERLEAVED}), FOUR_OF_FIVE),
        case("bf16-dp", spec_with({**bf16, "schedule.num_microbatches": 2, "mesh": {"dp_shard": 2}}), [[0, 5]]),
    ]
    found = run_layouts(2, cases)
    check(found["tied"], worker.train_case(case("one", spec_with(tied), [[0, 5]])), OTHER)
    bf16_one = worker.train_case(case("one", spec_with(bf16), [[0, 5]]))
    check(found["bf16"], bf16_one, BITWISE)
    narrow_one = worker.train_case(case("one", spec_with({**bf16, **narrow}), [[0, 5]]))
    for name in ("bf16-grads", "bf16-grads-vpp"):
        check(found[name], narrow_one, BITWISE)
        assert all(gradient.dtype == torch.bfloat16 for record in found[name] for gradient in record["gradients"].values())
    assert narrow_one["losses"] != bf16_one["losses"]
    assert bf16_one["losses"][-1] < bf16_one["losses"][0]
    assert found["bf16-dp"][0]["losses"] == pytest.approx(bf16_one["losses"], rel=1e-2)  # one flipped bf16 bit is 4e-3 of a weight


@pytest.mark.requirement("R-26")
@pytest.mark.requirement("R-62")
@pytest.mark.requirement("R-67")
def test_several_stages_a_rank_and_recompute_train_as_one_process(one_process: Any, worker: Any, run_layouts: Any, spec_with: Any) -> None:
    """Interleaved stages are equal to the bit, clipping and optimizers across chunks included; so is recompute under all of it."""
    reshard, tied = {"sharding.reshard_after_forward": True}, {"model.tie_embeddings": True}
    shards = {"mesh": {"dp_shard": 2}, "schedule.num_microbatches": 2}
    cases = [
        case("vpp", spec_with({**HYBRID, **INTERLEAVED}), FOUR_SLOTS),
        case("vpp-recompute", spec_with({**HYBRID, **INTERLEAVED, **RECOMPUTED}), FOUR_SLOTS),
        case("vpp-recompute-reshard", spec_with({**HYBRID, **INTERLEAVED, **RECOMPUTED, **reshard}), FOUR_SLOTS),
        case("vpp-tied", spec_with({**HYBRID, **INTERLEAVED, **tied}), FOUR_SLOTS),
        case("dp-recompute", spec_with({**HYBRID, **shards, **RECOMPUTED}), [[0, 6]]),
        case("dp-recompute-reshard", spec_with({**HYBRID, **shards, **RECOMPUTED, **reshard}), [[0, 6]]),
    ]
    found = run_layouts(2, cases)
    four = {"schedule.num_microbatches": 4}
    one = worker.train_case(case("one", spec_with({**HYBRID, **four}), [[0, 6]]))
    for name in ("vpp", "vpp-recompute", "vpp-recompute-reshard"):
        check(found[name], one, BITWISE)
    check(found["vpp-tied"], worker.train_case(case("one", spec_with({**HYBRID, **four, **tied}), [[0, 6]])), OTHER)
    for name in ("dp-recompute", "dp-recompute-reshard"):
        check(found[name], one, DATA_AXES)


def test_four_ranks_train_as_one_process(one_process: Any, worker: Any, run_layouts: Any, spec_with: Any) -> None:
    """Stages, shards and replicas together; four stages with more microbatches than stages."""
    cases = [
        case("pp-dp", spec_with({"schedule.num_microbatches": 2, "mesh": {"pp": 2, "dp_shard": 2}}), CUT),
        case("tied", spec_with({"schedule.num_microbatches": 2, "mesh": {"pp": 2, "dp_shard": 2}, "model.tie_embeddings": True}), CUT),
        case(
            "vpp-dp", spec_with({**INTERLEAVED, "schedule.num_microbatches": 2, "mesh": {"pp": 2, "vpp": 2, "dp_shard": 2}}), FOUR_OF_FIVE
        ),
        case("hsdp", spec_with({"schedule.num_microbatches": 1, "mesh": {"dp_replicate": 2, "dp_shard": 2}}), [[0, 5]]),
        case("pp4", spec_with({"schedule.num_microbatches": 4, "mesh": {"pp": 4}}), FOUR_OF_FIVE),
    ]
    found = run_layouts(4, cases)
    one = worker.train_case(case("one", spec_with({"schedule.num_microbatches": 4}), [[0, 5]]))
    tied = worker.train_case(case("one", spec_with({"schedule.num_microbatches": 4, "model.tie_embeddings": True}), [[0, 5]]))
    check(found["pp-dp"], one, OTHER)
    check(found["tied"], tied, OTHER)
    for name in ("hsdp", "vpp-dp"):
        check(found[name], one, DATA_AXES)
    check(found["pp4"], one, BITWISE)
