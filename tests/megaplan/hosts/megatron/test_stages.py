"""Peaks of every pipeline stage: SimuMax's runs on B200, and what recompute saves in published runs."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from accuracy_megatron.launches import changed, refusals, stage_of_launch

import megaplan
from megaplan.budget.megatron import megatron_kept_bytes
from megaplan.hosts.megatron.peak import memory
from megaplan.hosts.megatron.run import MegatronStage
from megaplan.hosts.megatron.stages import even_sizes
from megaplan.hosts.megatron.storage import State, optimizer_state, parameters

ROWS = json.loads((Path(__file__).parent / "simumax.json").read_text(encoding="utf-8"))["rows"]
STAGES = [(row, rank) for row in ROWS for rank in range(len(row["peak_mib"]))]
MIB = 2**20


def stage_of(row: dict[str, Any], rank: int, **changes: Any) -> MegatronStage:
    arguments = {**row["arguments"], **changes}
    assert refusals(arguments, row["gpus"]) == ()
    return stage_of_launch(arguments, row["gpus"], row["padded_vocab_size"], row["platform"], pp_rank=rank, month=row["month"])


def error(row: dict[str, Any], rank: int) -> float:
    return memory(stage_of(row, rank)).peak / MIB / row["peak_mib"][rank] - 1


@pytest.mark.parametrize(("row", "rank"), STAGES, ids=lambda value: value["name"] if isinstance(value, dict) else str(value))
def test_a_stage_is_within_a_quarter_of_a_percent(row: dict[str, Any], rank: int) -> None:
    assert abs(error(row, rank)) <= 0.0025


def test_stages_of_dense_models_are_within_a_few_mebibytes() -> None:
    dense = [(row, rank) for row, rank in STAGES if row["name"].startswith("llama")]
    assert len(dense) == 17
    assert max(abs(error(row, rank)) * row["peak_mib"][rank] for row, rank in dense) <= 17
    assert mean(abs(error(row, rank)) for row, rank in STAGES) <= 0.001


def test_the_first_stage_peaks_while_a_layer_works() -> None:
    phases = {row["name"]: memory(stage_of(row, 0)).peak_phase for row, _ in STAGES if len(row["peak_mib"]) > 1}
    assert set(phases.values()) == {"layer forward", "layer backward"}
    assert all((phase == "layer forward") == ("deepseek" in name) for name, phase in phases.items())


def test_a_gated_mlp_backward_has_the_gradients_of_its_activations_input_and_output() -> None:
    stage = stage_of(next(row for row in ROWS if "tp1_pp2" in row["name"]), 0)
    width = 2 * 4096 * 28672
    assert stage.run.operator("-").backward == 2 * width  # of width + 2 · width, less the activation's output that is gone
    assert stage.run.operator("-").forward == 2 * 4096 * 8192


def test_four_copies_of_routed_rows_are_named_at_once() -> None:
    row = next(row for row in ROWS if row["name"].startswith("deepseekv3") and len(row["peak_mib"]) > 1)
    stage, rows = stage_of(row, 0), 2 * 4096 * 8 * 7168
    shared = 2 * 4096 * 7168
    assert stage.run.operator("E").forward == 4 * rows + shared
    alone = changed(stage, model__moe__num_experts=4)  # one expert a rank: rows arrive in its order
    assert alone.run.operator("E").forward == 3 * rows + shared
    flex = stage_of(row, 0, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    assert flex.run.operator("E").forward == rows + 2 * shared


STUDY = json.loads((Path(__file__).parent / "recompute.json").read_text(encoding="utf-8"))["models"][0]
NANO = STUDY["arguments"]
"""Nemotron 3 Nano on 16 H100."""
NANO_RUNS = {run["modules"]: run for run in STUDY["runs"]}


def nano(modules: str) -> MegatronStage:
    recompute = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    assert refusals({**NANO, **recompute}, STUDY["gpus"]) == ()
    return stage_of_launch({**NANO, **recompute}, STUDY["gpus"], STUDY["padded_vocab_size"], STUDY["platform"])


def state_of(stage: MegatronStage) -> State:
    return optimizer_state(stage, parameters(stage))


def nano_gb(modules: str) -> float:
    stage = nano(modules)
    moments = state_of(stage).moments if NANO_RUNS[modules]["first_step"] else 0
    return (memory(stage).peak - moments) / 1e9


@pytest.mark.parametrize("modules", NANO_RUNS)
def test_a_hybrid_under_hybridep_and_recompute_is_within_one_percent(modules: str) -> None:
    assert abs(nano_gb(modules) / NANO_RUNS[modules]["peak_gb"] - 1) <= 0.01


@pytest.mark.parametrize(("less", "more"), [("", "moe_act"), ("moe", "layernorm moe")])
def test_a_module_is_credited_what_it_saves(less: str, more: str) -> None:
    measured = NANO_RUNS[less]["peak_gb"] - NANO_RUNS[more]["peak_gb"]
    assert abs((nano_gb(less) - nano_gb(more)) / measured - 1) <= 0.005


def test_recompute_of_experts_keeps_their_input_alone() -> None:
    kept = set(nano("moe").run.operator("E").tensors)
    assert kept == {"norm.input", "norm.output", "norm.stats"}
    assert set(nano("layernorm moe").run.operator("E").tensors) == kept - {"norm.output"}
    everything = sum(nano("").run.operator("E").tensors.values())
    again = everything - sum(nano("moe").run.operator("E").tensors.values())
    assert nano("moe").run.operator("E").backward >= again + nano("").run.operator("E").forward


def test_hybridep_keeps_its_maps_and_leaves_the_last_ones() -> None:
    stage = nano("")
    handle = 8 * 8192 * (4 + 16 * 5)
    assert stage.run.operator("E").tensors["dispatch.handle"] == handle
    left = 8192 * 128 * (1 + 4) + 4 * 8192 * 6 + handle
    assert memory(stage).leftover == 23 * left


def test_a_library_whose_buffers_are_unknown_is_refused() -> None:
    assert refusals({**NANO, "moe_flex_dispatcher_backend": "ncclep"}, 16) == (
        "--moe-flex-dispatcher-backend ncclep: it is read as one of deepep, hybridep",
    )


def test_the_precision_aware_optimizer_of_a_launch_has_its_own_dtypes() -> None:
    aware = {**NANO, "use_precision_aware_optimizer": True}
    narrow = {**aware, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    stages = [stage_of_launch(one, 16, 131072, "h100") for one in (NANO, aware, narrow)]
    masters, moments = zip(*((state.other_master, state.other_moments) for state in map(state_of, stages)), strict=True)
    assert masters == (masters[0], masters[0] // 2, masters[0] // 2)
    assert moments == (2 * masters[0], 2 * masters[0], masters[0])


@pytest.mark.parametrize(
    ("given", "layers", "pp", "sizes"),
    [
        ({}, 12, 3, [4, 4, 4]),
        ({"num_layers_per_virtual_pipeline_stage": 2}, 16, 2, [2, 2] * 4),
        ({"num_virtual_stages_per_pipeline_rank": 2}, 16, 2, [4, 4] * 2),
        ({"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 5}, 8, 2, [3, 5]),
        ({"decoder_first_pipeline_num_layers": 2}, 14, 3, [2, 6, 6]),
        ({"decoder_first_pipeline_num_layers": 4, "num_layers_per_virtual_pipeline_stage": 2}, 12, 2, [1, 2] * 4),
        ({"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}, 14, 4, [3, 4, 4, 3]),
    ],
)
def test_layers_of_a_pipeline_without_a_layout(given: dict[str, int], layers: int, pp: int, sizes: list[int]) -> None:
    """Layers are divided as Megatron-Core does; with its own first stage, the rank after it says how many virtual stages there are."""
    assert even_sizes(given, layers, pp) == sizes


@pytest.mark.parametrize(("mesh", "kind"), [({"pp": 4}, "1f1b"), ({"pp": 2, "vpp": 2}, "interleaved_1f1b")])
def test_slots_of_equal_layers_keep_alike(mesh: dict[str, int], kind: str) -> None:
    """A slot keeps what its own rank's chunk keeps; the first has the embedding beside it, the last the head."""
    changes = ("host={name: megatron}", "model.num_layers=32", f"schedule.kind={kind}", "schedule.num_microbatches=8", "split.mode=equal")
    job = megaplan.load("plans/llama-3.1-8b.yaml", *changes, mesh=mesh)
    first, *inner, last = [kept.full for kept in megatron_kept_bytes(job.spec, job.inventory, job.layout)]
    assert len(set(inner)) == 1
    assert min(first, last) >= inner[0] > 0
