"""Transfers by their invariants: every width moves its own bytes, and an exchange sends the bytes counted rank by rank."""

from dataclasses import replace
from random import Random

import pytest

import megaplan
from megaplan.cost.blocks import rank_workload
from megaplan.cost.rates import rates_of
from megaplan.cost.times import model_times
from megaplan.cost.transfers import RankGroup, Transfers, boundary_times, context_transfers, exchange_ns, gather_ns, layer_transfers, sum_ns
from megaplan.families.registry import FAMILIES
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

NO_LATENCY = {"collective_latency_ns": 0}
MLA = {
    "kind": "mla",
    "num_heads": 32,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
}
ITEM = 2  # bf16
TOKENS = 2 * 4096
MIB = 2**20


def of_layer(spec: Spec) -> Transfers:
    block = build_inventory(spec).layers[0]
    return layer_transfers(rates_of(spec), spec, rank_workload(spec, spec.precision.of(block.family)), block)


def gathered(spec: Spec, group: RankGroup, elements: int) -> int:
    return gather_ns(rates_of(spec), spec, group, elements * ITEM)


def assert_gathered(make_spec, axis: str, key: str, more: int, per_token: int) -> None:
    """A wider MLA key is gathered per token over two ranks: once in forward, and twice in backward."""
    one, other = (
        make_spec("A", model={"attention": {**MLA, key: MLA[key] + extra}}, mesh={axis: 2}, device=NO_LATENCY) for extra in (0, more)
    )
    grown, before, step = of_layer(other), of_layer(one), gathered(one, RankGroup(2, 1), TOKENS * per_token)
    assert grown.forward_ns - before.forward_ns == pytest.approx(step, abs=2)
    assert grown.input_ns - before.input_ns == pytest.approx(2 * step, abs=3)
    assert grown.again_ns - before.again_ns == pytest.approx(step, abs=2)
    assert (step > 0) == (per_token > 0)


@pytest.mark.parametrize(
    ("key", "more", "per_token"),
    [("q_lora_rank", 64, 64), ("kv_lora_rank", 64, 64), ("qk_rope_head_dim", 32, 32), ("qk_nope_head_dim", 64, 0), ("v_head_dim", 64, 0)],
)
def test_tensor_ranks_gather_each_latent_once(make_spec, key, more, per_token):
    """MLA under TP gathers its latents in forward, and twice in backward; the sum of its output is scattered as before."""
    assert_gathered(make_spec, "tp", key, more, per_token)


@pytest.mark.parametrize(
    ("key", "more", "per_token"),
    [
        ("qk_nope_head_dim", 64, 32 * 64),
        ("qk_rope_head_dim", 32, 32 * 32),
        ("v_head_dim", 64, 32 * 64),
        ("q_lora_rank", 64, 0),
        ("kv_lora_rank", 64, 0),
    ],
)
def test_context_ranks_gather_each_head_s_keys_and_values(make_spec, key, more, per_token):
    """Under CP all that a head needs of a token is gathered: in forward, again in backward, and its gradients are scattered."""
    assert_gathered(make_spec, "cp", key, more, per_token)


@pytest.mark.parametrize(("low", "width"), [(False, 256 + 32), (True, 32 * (64 + 128) // 2 + 32)])
def test_latents_are_gathered_and_what_multiplies_is_summed(make_spec, low, width):
    """Backward sums gradients of latents; in eight bits those of the keys and values of a rank's heads, and of the rotary key."""
    mesh = {"cp": 2, "tp": 2, "context_exchange": "latents"}
    spec = make_spec("A", model={"attention": MLA}, mesh=mesh, device=NO_LATENCY)
    block = build_inventory(spec).layers[0]
    load = rank_workload(spec, spec.precision.of(block.family))._replace(low=low)
    exchanges = FAMILIES["A"].exchanges(spec.model.attention, spec.model.hidden_size, block.variant)
    gathers, sums = (gathered(spec, RankGroup(2, 2), TOKENS * each) for each in (256 + 32, width))
    assert context_transfers(rates_of(spec), spec, load, exchanges) == Transfers(gathers, gathers + sums, gathers, gathers)


def test_a_latent_query_is_narrower_than_none(make_spec):
    """The whole input is gathered in place of the latent if there is no q-LoRA."""
    without = {**MLA, "q_lora_rank": None}
    one, other = (make_spec("A", model={"attention": each}, mesh={"tp": 2}, device=NO_LATENCY) for each in (MLA, without))
    step = gathered(one, RankGroup(2, 1), TOKENS * (4096 - 512))
    assert of_layer(other).forward_ns - of_layer(one).forward_ns == pytest.approx(step, abs=2)


def test_a_sharded_block_gathers_and_scatters_its_stream(make_spec):
    """One gather and one scatter of the same width forward; in backward both in reverse, and the gather once more."""
    spec = make_spec("D", mesh={"tp": 4})
    once = gathered(spec, RankGroup(4, 1), TOKENS * 4096)
    assert of_layer(spec) == Transfers(2 * once, 3 * once, once)


def test_grouped_keys_and_values_are_gathered(make_spec):
    """8 heads of 128, keys and values; only ranks of one tensor rank's share."""
    spec = make_spec("A", mesh={"cp": 2, "tp": 2})
    keys, stream = gathered(spec, RankGroup(2, 2), TOKENS * 8 * 128), gathered(spec, RankGroup(2, 1), TOKENS // 2 * 4096)
    assert of_layer(spec).again_ns == keys + stream


@pytest.mark.parametrize("seed", range(8))
def test_an_exchange_sends_what_each_rank_is_due(make_spec, seed):
    """Rank by rank: nothing to itself, an even share to every other, over the fabric in the node and the adapter beyond."""
    random = Random(seed)
    size, per_node = random.choice([2, 4, 8, 16]), random.choice([2, 4, 8])
    spec = make_spec("E", mesh={"dp_shard": 16}, device={"per_node": per_node})
    rates, share = rates_of(spec), 1 << random.randint(12, 24)
    in_node = sum(share for rank in range(1, size) if rank < per_node)
    outside = share * (size - 1) - in_node
    expected = rates.latency_ns + max(rates.node_ns(in_node), rates.network_ns(outside))
    assert exchange_ns(rates, spec, RankGroup(size, 1), share * size) == expected


@pytest.mark.parametrize(("policy", "waits"), [("none", 0), ("selective", 1), ("full", 1)])
def test_recompute_gathers_keys_and_values_again(make_spec, policy, waits):
    """Recompute of the core alone repeats its reads of other context ranks, which are not kept. Tensor groups gather for whole blocks."""
    spec = make_spec("A", mesh={"cp": 2})
    assert of_layer(spec).repeated_ns(policy) == waits * gathered(spec, RankGroup(2, 1), TOKENS * 2 * 8 * 128)
    assert of_layer(make_spec("A", mesh={"tp": 2})).repeated_ns("selective") == 0


def test_alone_nothing_is_waited_for(make_spec):
    spec = make_spec("D")
    assert of_layer(spec) == Transfers()
    assert exchange_ns(rates_of(spec), spec, RankGroup(1, 1), 1 << 20) == 0


@pytest.mark.parametrize("per_node", [8, 2])
def test_a_boundary_is_one_microbatch_s_stream(make_spec, per_node):
    """Over the network once the job leaves a node; a tensor rank sends its share of the tokens."""
    spec = make_spec("DD", mesh={"pp": 2, "tp": 2}, schedule={"num_microbatches": 2}, device={"per_node": per_node})
    rates, sent = rates_of(spec), TOKENS // 2 * 4096 * ITEM
    assert boundary_times(rates, spec) == (rates.latency_ns + (rates.node_ns(sent) if per_node == 8 else rates.network_ns(sent)),)


def test_a_boundary_carries_the_values_that_layers_behind_read(make_spec):
    """A tensor rank's heads of all tokens, in addition to its share of the stream; the widest boundary of a layout counts for all."""
    heads = {"kind": "gqa", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    attention = heads | {"shared_keys": [{"source": 1, "layers": [3]}]}
    spec = make_spec("AAAAA", mesh={"pp": 2, "tp": 2}, schedule={"num_microbatches": 2}, model={"attention": attention})
    rates, stream = rates_of(spec), TOKENS // 2 * 4096 * ITEM
    narrow, wide = (rates.latency_ns + rates.node_ns(sent) for sent in (stream, stream + TOKENS * 2 * 8 // 2 * 128 * ITEM))
    assert boundary_times(rates, spec) == (narrow, wide, wide, narrow)
    times = model_times(spec, build_inventory(spec))
    assert [times.widest_ns(cuts) for cuts in ((1,), (1, 4), (1, 2), (3, 4))] == [narrow, narrow, wide, wide]
    assert times.boundary_ns == narrow


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_rows_go_to_every_slice_of_their_experts(make_spec, ep, etp):
    """A rank's tokens, once for each expert chosen, then gathered by the ranks with its slices; out and back, forward and backward."""
    moe = {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 1024, "shared_ffn_hidden_size": 0, "activation": "relu2"}
    spec = make_spec("E", model={"moe": moe}, mesh={"dp_shard": 8, "ep": ep, "etp": etp})
    rates, sent = rates_of(spec), TOKENS * 4 * 4096 * ITEM
    once = exchange_ns(rates, spec, RankGroup(ep, etp), sent) + gather_ns(rates, spec, RankGroup(etp, 1), etp * sent)
    assert of_layer(spec) == Transfers(2 * once, 2 * once)


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_gathered_tokens_go_to_all_ranks_of_the_groups(make_spec, ep, etp):
    """A rank's tokens, once however many experts they choose: over ep, then over etp, and sums back; skew moves no token."""
    moe = {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 1024, "shared_ffn_hidden_size": 0, "activation": "relu2", "routing_skew": 2.0}
    given = {"mesh": {"dp_shard": 8, "ep": ep, "etp": etp}, "host": {"moe_dispatcher": "allgather"}}
    spec = make_spec("E", model={"moe": moe}, **given)
    rates, own = rates_of(spec), TOKENS * 4096 * ITEM
    once = gather_ns(rates, spec, RankGroup(ep, etp), ep * own) + gather_ns(rates, spec, RankGroup(etp, 1), ep * etp * own)
    assert of_layer(spec) == Transfers(2 * once, 2 * once)


def sent_over_nodes(make_spec, ranks: int, **device: object) -> tuple[Spec, RankGroup]:
    return make_spec("AD", mesh={"dp_shard": ranks}, device={"name": "h100-sxm", "per_node": 8, **device}), RankGroup(ranks, 1)


def test_rings_of_one_node_take_latency_and_bytes_alone(make_spec):
    spec, group = sent_over_nodes(make_spec, 8)
    rates = rates_of(spec)
    assert gather_ns(rates, spec, group, 8 * MIB, 5) == rates.latency_ns + rates.node_ns(7 * MIB)
    assert sum_ns(rates, spec, group, 8 * MIB, 5) == 2 * gather_ns(rates, spec, group, 8 * MIB, 5)


@pytest.mark.parametrize("ranks", [16, 64, 1024])
def test_every_step_of_a_ring_over_nodes_takes_time(make_spec, ranks):
    spec, group = sent_over_nodes(make_spec, ranks)
    rates, nodes = rates_of(spec), ranks // 8
    small, large = (gather_ns(rates, spec, group, size, 3) - rates.latency_ns for size in (ranks, ranks * 10**12))
    assert small == pytest.approx(3 * ((ranks - nodes) * 1900 + (nodes - 1) * 4000), abs=5)  # LL128
    bytes_alone = gather_ns(replace(rates, rings=()), spec, group, ranks * 10**12) - rates.latency_ns
    assert large == bytes_alone + 3 * ((ranks - nodes) * 3400 + (nodes - 1) * 9600)  # Simple, at the whole rate


def test_sums_of_many_nodes_run_in_a_tree(make_spec):
    spec = make_spec("AD", mesh={"dp_shard": 8, "dp_replicate": 64}, device={"name": "h100-sxm", "per_node": 8})
    rates, group = rates_of(spec), RankGroup(64, 8)
    assert sum_ns(rates, spec, group, 64) == pytest.approx(2 * rates.latency_ns + 2 * 6 * 8500, abs=5)
    assert 2 * gather_ns(rates, spec, group, 64) == pytest.approx(2 * (rates.latency_ns + 63 * 4000), abs=5)
    assert sum_ns(rates, spec, group, 64 * 10**12) == 2 * gather_ns(rates, spec, group, 64 * 10**12)  # a ring reaches more of the rate


def test_throughput_of_sharded_models_falls_with_the_ranks_and_less_with_copies(make_spec):
    def rate(**mesh: int) -> float:
        spec = megaplan.load("plans/llama-3.1-8b.yaml", *(f"mesh.{key}={value}" for key, value in mesh.items()))
        return megaplan.estimate(spec, "batch.seq_length=4096", "schedule.num_microbatches=1").step_time.tokens_per_second_per_device

    found = [rate(pp=1, dp_shard=ranks, tp=1) for ranks in (8, 128, 512, 2048)]
    assert found[-1] < 0.8 * found[1]
    assert rate(pp=1, dp_shard=8, dp_replicate=256, tp=1) > 1.3 * found[-1]
