"""Plans whose steps are CUDA graphs, and the reasons of the others."""

from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.spec.load import load_spec
from megaplan.spec.step_graphs import WHY_EAGER, replays_graphs, replays_update, why_eager

TINY = "plans/tiny-hybrid.yaml"
EAGER: dict[str, tuple[str, ...]] = {
    "host.name = torchtitan": (
        "host={name: torchtitan}",
        "model.mamba=null",
        "model.recurrent=null",
        "model.moe=null",
        "model.pattern=AD",
        "model.num_layers=8",
        "optimizer.matrix=adamw",
    ),
    "host.cuda_graphs = none": ("host.cuda_graphs=none",),
    "mesh.dp_shard = 2": ("mesh.dp_shard=2",),
    "mesh.pp = 2, mesh.cp = 2": ("mesh.pp=2", "mesh.cp=2", "schedule.num_microbatches=2"),
    "host.kernels = reference": ("host.kernels=reference",),
    "model.moe.null_experts = 2": ("model.moe.null_experts=2",),
    "gradients in fp16": ("precision.params=fp16",),
    "precision.recipe.name = fp8_rowwise with model.moe": ("precision.recipe.name=fp8_rowwise",),
}


def test_one_process_with_kernels_replays() -> None:
    assert why_eager(load_spec(TINY).spec) is None
    assert replays_graphs(load_spec(TINY, ("host.cuda_graphs=microbatch", "lora={rank: 4, alpha: 8}")).spec)


def test_the_update_is_replayed_if_asked_for_and_microbatches_are() -> None:
    found = {value: replays_update(load_spec(TINY, (f"host.cuda_graphs={value}",)).spec) for value in ("none", "microbatch", "step")}
    assert found == {"none": False, "microbatch": False, "step": True}
    assert not replays_update(load_spec(TINY, ("host.cuda_graphs=step", "mesh.dp_shard=2")).spec)


@pytest.mark.parametrize("said", EAGER)
def test_a_reason_names_its_setting(said: str) -> None:
    reason = why_eager(load_spec(TINY, EAGER[said]).spec)
    assert reason is not None
    assert reason.startswith(f"{said}: ")


def test_every_reason_of_the_table_is_reached() -> None:
    found = {why_eager(load_spec(TINY, given).spec) for given in EAGER.values()}
    assert {text for _, text in WHY_EAGER} == {str(each).partition(": ")[2] for each in found}


OTHERS = [("megarun", "cuda_graphs: layers"), ("megarun", "cuda_graphs: iteration"), ("megarun", "moe_dispatcher: flex")]
OTHERS += [("megatron", "cuda_graphs: microbatch"), ("megatron", "cuda_graphs: step")]


@pytest.mark.parametrize(("host", "given"), OTHERS)
def test_a_value_of_another_host_is_refused(host: str, given: str, capsys: Any) -> None:
    with pytest.raises(MegaplanError) as refused:
        load_spec(TINY, (f"host={{name: {host}, {given}}}",))
    assert "MP695" in {each.code for each in refused.value.diagnostics}
