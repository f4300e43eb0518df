"""Generation of a group: work that can be counted by hand, slots, and a full cache."""

from dataclasses import replace

import pytest

import megaplan
from megaplan.api.load import load
from megaplan.budget.serving import forward_flops, served
from megaplan.dtypes import DType
from megaplan.post_training.rollout import Prompt, generate

NO_PROMPT = Prompt(0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def model():
    job = load("plans/llama-3.1-8b-rl.yaml")
    return served(job.spec, job.inventory, (1, 1, 1), DType.BF16, DType.BF16)


def test_decoding_reads_parameters_and_cache_once(model):
    assert model.read_bytes == 2 * (8_030_261_248 - 128_256 * 4096 - 4096)  # all except the embedding and the last norm
    assert model.token_bytes == 2 * 2 * 32 * 8 * 128
    alone, with_context = (model.decode_seconds(1, context) for context in (0, 100_000))
    rate = model.rates.device.memory_bandwidth.value * model.rates.percent["memory"] / 100
    assert with_context - alone == pytest.approx(100_000 * model.token_bytes / rate, rel=1e-6)


def test_equal_lengths_run_together(model):
    found = generate(model, [100.0] * 8, NO_PROMPT, 8, float("inf"))
    assert (found.steps, found.slots, found.empty, found.stops) == (100, 8, 0, 0)
    assert found.seconds == pytest.approx(100 * model.decode_seconds(8, 50))


def test_fewer_slots_take_more_steps(model):
    found = generate(model, [100.0] * 8, NO_PROMPT, 4, float("inf"))
    assert (found.steps, found.slots) == (200, 4)


def test_the_longest_response_leaves_slots_empty(model):
    found = generate(model, [100.0, 100.0, 100.0, 1000.0], NO_PROMPT, 4, float("inf"))
    assert found.steps == 1000
    assert found.empty == pytest.approx(1 - 1300 / 4000)


def test_a_full_cache_stops_sequences_and_all_of_them_end(model):
    free, full = (generate(model, [100.0] * 8, NO_PROMPT, 8, capacity) for capacity in (float("inf"), 400.0))
    assert free.stops == 0 < full.stops
    assert full.steps > free.steps
    assert full.seconds > free.seconds
    assert full.steps >= 8 * 100 / 8


def test_experts_are_read_as_far_as_a_batch_chooses_them(model):
    mixture = replace(model, expert_bytes=10**10, experts=(64, 2))
    plain = [model.decode_seconds(batch, 0) for batch in (1, 64)]
    more = [mixture.decode_seconds(batch, 0) - without for batch, without in zip((1, 64), plain, strict=True)]
    rate = model.rates.device.memory_bandwidth.value * model.rates.percent["memory"] / 100
    assert more[0] == pytest.approx(10**10 * (1 - (63 / 64) ** 2) / rate, rel=1e-3)
    assert more[0] < more[1] < 10**10 / rate


def test_prefill_is_bound_by_products(model):
    job = load("plans/llama-3.1-8b-rl.yaml")
    flops = forward_flops(job.spec, job.inventory, 128)
    rate = model.rates.device.peak_flops[DType.BF16].value * model.rates.percent["D"] / 100
    assert model.prefill_seconds(8192, flops) == pytest.approx(8192 * flops / rate, rel=1e-6)


def test_experts_have_tokens_of_every_tensor_group_that_shares_them(model):
    """Eight groups of one rank each: an expert's rank has the tokens of all, and reads what eight times the batch chooses."""
    alone = replace(model, expert_bytes=10**10, experts=(64, 2))
    shared = replace(alone, degrees=(1, 1, 8))
    assert shared.decode_seconds(1, 0) - model.decode_seconds(1, 0) == pytest.approx(
        alone.decode_seconds(8, 0) - model.decode_seconds(8, 0), rel=1e-3
    )


def test_without_graphs_the_host_launches_every_layer(model):
    """The device waits for the host in a small step, and hides it in a large one."""
    eager = replace(model, eager_ns=400_000)
    assert eager.decode_seconds(1, 0) == pytest.approx(64 * 0.4e-3)
    assert eager.decode_seconds(1024, 8192) == model.decode_seconds(1024, 8192) > 64 * 0.4e-3


def test_a_plan_without_graphs_generates_no_faster():
    graphs, eager = (megaplan.rl("plans/llama-3.1-8b-rl.yaml", f"post_training.rollout.graphs={given}") for given in ("true", "false"))
    assert eager.engine.decode_seconds > graphs.engine.decode_seconds
    assert eager.engine.cache_tokens > graphs.engine.cache_tokens
    named = [{figure.name for figure in found.figures} & {"graph_bytes", "eager_layer_seconds"} for found in (graphs, eager)]
    assert named == [{"graph_bytes"}, {"eager_layer_seconds"}]


@pytest.mark.parametrize("staleness", [0, 1, 8])
def test_more_devices_never_generate_longer_and_more_responses_never_shorter(staleness):
    """Groups of few responses, too: in the long run every group has responses of all lengths, not the longest alone."""
    given = ("post_training.placement=split", f"post_training.staleness={staleness}", "post_training.prompts=8")

    def seconds(gpus, samples):
        found = megaplan.rl("plans/llama-3.1-8b-rl.yaml", *given, f"post_training.rollout.gpus={gpus}", f"post_training.samples={samples}")
        return {phase.name: phase.seconds.value for phase in found.times}["rollout"]

    by_gpus = [seconds(gpus, 8) for gpus in (4, 8, 16, 32, 64)]
    assert by_gpus == sorted(by_gpus, reverse=True)
    by_samples = [seconds(32, samples) for samples in (1, 4, 8, 16, 64)]
    assert by_samples == sorted(by_samples)
