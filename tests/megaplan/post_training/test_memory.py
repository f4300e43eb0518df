"""Memory of a post-training plan: sums, parts, and where offloaded bytes go."""

import pytest

import megaplan
from megaplan.budget.pinned import page_locked_bytes
from megaplan.errors import MegaplanError
from megaplan.goodput.figures import figures
from megaplan.post_training.columns import DEVICE, HOST

SPEC = "plans/llama-3.1-8b-rl.yaml"
NODE = 8
MIXTURE = (
    "optimizer.matrix=adamw",
    "post_training={kind: rl, prompts: 8, samples: 8, placement: split, rollout: {tp: 1, pp: 2, ep: 2, prompt: 100, response: 500}}",
)


def phases(*changes):
    return {phase.name: phase for phase in megaplan.rl(SPEC, *changes).memory}


def test_totals_are_sums_of_named_columns():
    for phase in phases("post_training.critic={}", "post_training.reward={parameters: 8B}", "post_training.rollout.sleep=1").values():
        assert phase.total_bytes == sum(phase.columns.values())
        assert phase.host_total_bytes == sum(phase.host_columns.values())
        assert set(phase.columns) <= set(DEVICE)
        assert set(phase.host_columns) <= set(HOST)


def test_the_colocated_peak_is_no_less_than_either_part():
    found = megaplan.rl(SPEC)
    split = megaplan.rl(SPEC, "post_training.placement=split", "post_training.rollout.gpus=16")
    assert found.peak_bytes >= max(phase.total_bytes for phase in split.memory if phase.name == "training")
    engine = {phase.name: phase for phase in split.memory}["rollout"].columns["engine_parameters"]
    assert found.peak_bytes >= engine


def test_the_training_phase_is_the_estimate_of_its_microbatches():
    found = megaplan.rl(SPEC)
    plain = megaplan.estimate(SPEC, f"schedule.num_microbatches={found.microbatches}")
    trained = {phase.name: phase for phase in found.memory}["training"].columns
    own = sum(size for column, size in trained.items() if column.startswith(("policy", "training")) and column != "training_context")
    assert own == plain.peak_bytes


def test_what_leaves_the_device_is_on_the_host():
    away, here = phases(), phases("post_training.offload=[]")
    assert {"policy_parameters", "policy_optimizer"} <= set(here["rollout"].columns)
    assert not {"policy_parameters", "policy_optimizer", "policy_gradients", "reference_parameters"} & set(away["rollout"].columns)
    hosted = away["rollout"].host_columns
    ranks = here["rollout"].columns["policy_parameters"] + here["rollout"].columns["policy_optimizer"]
    assert hosted["host_policy_parameters"] + hosted["host_policy_optimizer"] <= NODE * ranks
    assert "host_reference" in hosted
    assert "host_reference" not in away["reference"].host_columns
    assert "host_policy_parameters" not in here["rollout"].host_columns


def test_a_sleeping_engine_copies_or_drops_its_parameters():
    levels = [phases(f"post_training.rollout.sleep={level}") for level in (0, 1, 2)]
    assert ["engine_parameters" in found["training"].columns for found in levels] == [True, False, False]
    copied = levels[1]["training"].host_columns["host_engine_parameters"]
    assert copied == NODE * levels[1]["rollout"].columns["engine_parameters"]
    assert "host_engine_parameters" not in levels[1]["rollout"].host_columns
    assert levels[2]["sleep"].host_total_bytes + copied == levels[1]["sleep"].host_total_bytes


def test_vllm_takes_its_fraction_and_sglang_leaves_the_rest():
    columns = phases()["rollout"].columns
    own = sum(
        size
        for column, size in columns.items()
        if column in ("engine_parameters", "kv_cache", "engine_activations", "engine_graphs", "engine_context")
    )
    capacity = 84943715697
    assert 0 <= int(0.6 * capacity) - own < 16 * 131072
    static = phases("post_training.rollout.engine=sglang")["rollout"].columns
    free = capacity - static["engine_context"]
    assert 0 <= int(0.6 * free) - static["engine_parameters"] - static["kv_cache"] < 131072


def test_a_reference_of_an_adapted_policy_takes_nothing():
    lora = ("host={name: megarun}", "precision={params: bf16}", "lora={rank: 16, alpha: 32}", "post_training.rollout.memory_fraction=0.5")
    found = megaplan.rl(SPEC, *lora)
    assert not any("reference_parameters" in phase.columns for phase in found.memory)
    assert found.sync_bytes < 2 * 8_030_261_248 // 50
    assert megaplan.rl(SPEC, *lora, "post_training.sync.merged=true").sync_bytes > 2 * 8_000_000_000


def test_a_host_that_is_too_small_does_not_fit():
    assert megaplan.rl(SPEC, "post_training.host_memory=2TiB").fits
    assert not megaplan.rl(SPEC, "post_training.host_memory=64GiB").fits


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("post_training=null", "MP851"),
        ("post_training.rollout.memory_fraction=0.2", "MP852"),
        ("post_training.rollout.response.max=5000", "MP850"),
        ("post_training.rollout.response={p50: 900, p90: 500}", "MP850"),
        ("post_training.rollout.response={max: 900}", "MP850"),
        ("post_training.rollout.response={mean: 2000, max: 900}", "MP850"),
        ("post_training.rollout.gpus=32", "MP850"),
        ("post_training.rollout.gpus=3", None),
        ("post_training.staleness=1", "MP850"),
        ("post_training.policy.updates=100000", "MP850"),
        ("post_training.rollout.tp=3", "MP218"),
        ("post_training.sync.bucket_bytes=3parsec", "MP470"),
        ("post_training.rollout.engine=trtllm", "MP123"),
        ("post_training.rollout.speed=3", "MP141"),
    ],
)
def test_bad_input_is_refused_with_a_code(change, code):
    if code is None:
        assert megaplan.rl(SPEC, change).engine.num_groups == 3
        return
    with pytest.raises(MegaplanError) as refused:
        megaplan.rl(SPEC, change)
    assert code in [item.code for item in refused.value.diagnostics]


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        (("post_training.rollout.response={p50: 900, p90: 500}",), "response.p50=500 --set post_training.rollout.response.p90=900"),
        (("post_training.rollout.response={mean: 900, p50: 800, p90: 1500}",), "response.mean=null"),
        (("post_training.rollout.tp=8", "post_training.rollout.ep=1"), "rollout.ep=null"),
        (("post_training.rollout.memory_fraction=0.2",), "memory_fraction=0.9"),
        (("post_training.rollout.memory_fraction=0.9", "model.num_layers=512"), "rollout.tp=2"),
        (("post_training.rollout.memory_fraction=0.9", "model.num_layers=1600"), "rollout.tp=8"),
    ],
)
def test_a_hint_is_enough(changes, hint):
    with pytest.raises(MegaplanError) as refused:
        megaplan.rl(SPEC, *changes)
    (text, *_) = refused.value.diagnostics[0].hints
    assert text.endswith(hint)
    assert megaplan.rl(SPEC, *changes, *text.removeprefix("--set ").split(" --set "))


def test_the_hint_divides_experts_that_have_ranks_of_their_own():
    """Ranks of a tensor group beyond those of the experts divide nothing else of an expert, unless they are the experts' ranks, too."""
    given = (*MIXTURE, "post_training.rollout.pp=1", "post_training.rollout.gpus=16", "device.name=a100-40gb")
    with pytest.raises(MegaplanError) as refused:
        megaplan.rl("plans/mixtral-8x7b.yaml", *given)
    assert refused.value.diagnostics[0].hints[0] == "--set post_training.rollout.tp=4 --set post_training.rollout.ep=null"
    assert megaplan.rl("plans/mixtral-8x7b.yaml", *given, "post_training.rollout.tp=4", "post_training.rollout.ep=null")


def test_a_group_of_experts_has_all_stages():
    """Two stages of two ranks of experts each: four devices, two of which would hold half of the experts."""
    with pytest.raises(MegaplanError) as refused:
        megaplan.rl("plans/mixtral-8x7b.yaml", *MIXTURE, "post_training.rollout.gpus=2")
    (found, *_) = refused.value.diagnostics
    assert (found.code, found.hints[0]) == ("MP850", "--set post_training.rollout.gpus=4")


def test_a_node_has_the_processes_of_its_devices():
    """A job of one device has one trainer and one engine, not a node of engines."""
    found = [
        {phase.host_columns["host_processes"] for phase in phases("mesh.pp=1", f"mesh.dp_shard={count}").values()} for count in (1, 2, 4)
    ]
    ((one,), (two,), (four,)) = found
    assert (two, four) == (2 * one, 4 * one)


def test_a_frozen_model_returns_and_what_changes_also_goes():
    """Bytes over a device's link are those of its parts on the device, in each direction in which they move."""
    names = ("parameters", "optimizer", "reference")
    sizes = phases("post_training.offload=[]", "mesh.pp=1", "mesh.dp_shard=16")["log_probs"].columns
    columns = ("policy_parameters", "policy_optimizer", "reference_parameters")
    rate = figures()["copy_bytes_per_second"].value
    for name, column, times in zip(names, columns, (2, 2, 1), strict=True):
        found = megaplan.rl(SPEC, f"post_training.offload=[{name}]", "mesh.pp=1", "mesh.dp_shard=16")
        (seconds,) = (phase.seconds.value for phase in found.times if phase.name == "offload")
        assert seconds * rate == pytest.approx(times * sizes[column])


def test_states_are_allocated_with_the_cache_where_parameters_arrive_first():
    loop = ("post_training={kind: rl, prompts: 8, samples: 8, rollout: {prompt: 100, response: 500}}", "optimizer.matrix=adamw")
    found = {
        staged: {
            phase.name: phase for phase in megaplan.rl("plans/mamba-codestral-7b.yaml", *loop, f"post_training.sync.staged={staged}").memory
        }
        for staged in ("true", "false")
    }
    assert ["recurrent_states" in found[staged]["sync"].columns for staged in ("true", "false")] == [False, True]


@pytest.mark.parametrize("host", ["megarun", "megatron"])
def test_page_locked_copies_are_rounded_tensor_by_tensor(host):
    """A copy takes at least its bytes, less than twice as much, and a tensor of 2^n bytes takes no more."""
    assert [page_locked_bytes(size) for size in (0, 1, 2, 3, 2**20, 2**20 + 1)] == [0, 1, 2, 4, 2**20, 2**21]
    given = (f"host={{name: {host}}}", "precision={params: bf16}")
    exact, pinned = phases(*given)["rollout"].host_columns, phases(*given, "post_training.pinned=true")["rollout"].host_columns
    name = "host_policy_parameters"
    assert exact[name] < pinned[name] < 2 * exact[name]
    assert {key: size for key, size in exact.items() if key != name} == {key: size for key, size in pinned.items() if key != name}


def test_an_engine_in_eight_bits_keeps_embedding_and_head_in_sixteen():
    """Engines quantise the linears of layers: 6.98 of 8.03 billion parameters take a byte, the others two."""
    found = phases("post_training.rollout.dtype=fp8")["rollout"].columns["engine_parameters"]
    outside = 2 * 128_256 * 4096 + 4096
    assert found == 8_030_261_248 + outside
