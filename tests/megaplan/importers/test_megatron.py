"""`megaplan import megatron`: a launch as a spec, and the same bytes as the launch itself."""

from pathlib import Path
from typing import Any

import pytest
from accuracy_megatron.launches import launch_text, refusals, spec_of_launch, stages_of_spec
from megatron_goldens import STATED

from megaplan.budget.peaks import build_budget
from megaplan.cli.main import run
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError, Severity
from megaplan.hosts.megatron.peak import memory
from megaplan.hosts.megatron.storage import parameters
from megaplan.importers.megatron.spec import import_megatron
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.models import Spec

LAUNCH = """#!/bin/bash
# a hybrid of two stages
export CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8
torchrun --nnodes 2 --nproc-per-node 8 pretrain_hybrid.py \\
  --hybrid-layer-pattern 'ME*EMEM-|MEMEM*E-' --pipeline-model-parallel-size 2 --expert-model-parallel-size 4 \\
  --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 4 --kv-channels 32 \\
  --num-experts 8 --moe-ffn-hidden-size 384 --ffn-hidden-size 640 --swiglu --normalization RMSNorm --disable-bias-linear \\
  --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 1000 \\
  --seq-length 512 --micro-batch-size 2 --global-batch-size=128 --use-distributed-optimizer --bf16 --no-rope-fusion \\
  --recompute-granularity selective --recompute-modules core_attn moe_act \\
  --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --train-iters 500 \\
  --moe-router-topk-scaling-factor 2.5
"""


def imported(text: str, *overrides: str, gpus: int | None = None) -> Spec:
    return import_megatron(text, "launch.sh", overrides, gpus).loaded.spec


def refused(text: str, gpus: int | None = None) -> dict[str, str]:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, "launch.sh", (), gpus)
    return {item.location.key or "": item.code for item in caught.value.diagnostics if item.severity is Severity.ERROR}


def test_a_launch_becomes_a_spec() -> None:
    spec = imported(LAUNCH)
    model, mesh, host = spec.model, spec.mesh, spec.host
    assert model.pattern == "MEAEMEMD|MEMEMAED"
    assert (model.vocab_size, model.hidden_size, model.tie_embeddings) == (1024, 256, False)
    assert model.moe is not None
    assert (model.moe.top_k, model.moe.activation) == (2, "swiglu")
    assert (mesh.pp, mesh.dp_shard, mesh.ep, mesh.etp, mesh.world_size) == (2, 8, 4, 1, 16)
    assert (spec.schedule.num_microbatches, spec.batch.micro_batch_size) == (8, 2)
    assert (host.name, host.cublas_workspace_kib, host.recompute_modules, host.hidden_dropout) == ("megatron", 8320, ("moe_act",), 0.1)
    assert dict(spec.recompute.blocks) == {"A": "selective"}
    assert spec.training.rate_schedule.model_dump() == {"kind": "cosine", "warmup_steps": None, "final_fraction": 0.1}
    assert (spec.split.mode, spec.training.steps, spec.training.learning_rate) == ("manual", 500, 1e-3)


def test_yaml_says_the_same() -> None:
    words = import_megatron("--num-layers 4 " + GPT, "launch.sh").document
    lines = ["num_layers: 4"]
    for argument in GPT.split("--")[1:]:
        key, _, value = argument.strip().partition(" ")
        lines.append(f"{key.replace('-', '_')}: {value or 'true'}")
    for text in ("\n".join(lines), "MODEL_ARGS:\n" + "\n".join(f"  --{line.replace('_', '-')}" for line in lines)):
        document = import_megatron(text, "launch.yaml").document
        assert document == words


def test_what_is_not_carried_is_told_and_the_gpus_are_stated() -> None:
    found = {item.code: item for item in import_megatron(LAUNCH, "launch.sh").loaded.diagnostics}
    assert "--moe-router-topk-scaling-factor 2.5: experts are chosen by another rule" in found["MP915"].detail
    assert found["MP915"].location.line == 12
    assert "MP917" not in found
    alone = {item.code for item in import_megatron("--num-layers 4 " + GPT, "launch.sh").loaded.diagnostics}
    assert "MP917" in alone


GPT = (
    "--hidden-size 256 --num-attention-heads 8 --seq-length 512 --bf16 --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --vocab-size 1024 --swiglu --micro-batch-size 1 --global-batch-size 16 --use-distributed-optimizer "
)
FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --megatron-fsdp-main-params-dtype fp32 "
    "--megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype fp32"
)
WRONG = {
    "--num-layers 4 --num-extra-heads 4": "MP913",
    "--num-layers 4 --hidden-size 4k": "MP916",
    "--num-layers 4 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers é": "MP916",
    "": "MP916",
    "--num-layers 4 --normalization T5Norm": "MP914",
    "--num-layers 4 --fp8-format fp8": "MP914",
    "--num-layers 4 --fp4-format e3m0": "MP914",
    "--num-layers 4 --transformer-impl inference_optimized": "MP914",
    "--num-layers 4 --transformer-impl local --fp8-format hybrid": "MP902",
    "--num-layers 4 --position-embedding-type learned_absolute": "MP916",
    "--num-layers 4 --position-embedding-type relative": "MP914",
    "--num-layers 4 --fp16": "MP914",
    "--num-layers 4 --moe-router-load-balancing-type quantile --num-experts 8": "MP914",
    "--num-layers 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3 --num-experts 8": "MP914",
    "--num-layers 4 --num-experts 8 --tensor-model-parallel-size 2": "MP902",
    "--num-layers 4 --window-size 128 128": "MP914",
    "--num-layers 4 --global-batch-size 7 --micro-batch-size 2": "MP914",
    "--num-layers 4 --recompute-granularity selective --recompute-modules shared_experts": "MP914",
    "--num-layers 4 --recompute-granularity full --recompute-method other": "MP914",
    "--num-layers 4 --optimizer soap": "MP914",
    "--num-layers 4 --exp-avg-dtype bf16": "MP914",
    "--num-layers 5 --pipeline-model-parallel-size 2": "MP914",
    "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL|": "MP911",
    "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|tttL": "MP911",
    "--num-layers 4 --pipeline-model-parallel-layout Ettt((t)*1)*1L": "MP912",
    "--hybrid-layer-pattern M*X*": "MP910",
    "--hybrid-layer-pattern M|M|M --pipeline-model-parallel-size 2": "MP911",
    "--hybrid-layer-pattern MDM-": "MP914",
    "--hybrid-layer-pattern M-M-/M*": "MP914",
    "--hybrid-layer-pattern MEM-/EE": "MP914",
    "--hybrid-layer-pattern /M*": "MP914",
    "--hybrid-layer-pattern M|M --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1": "MP911",
    "--hybrid-layer-pattern M|M|M|M --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2": "MP914",
    "--num-layers 4 --fine-grained-activation-offloading --offload-modules mamba": "MP914",
    "--num-layers 4 --cuda-graph-impl local --cuda-graph-scope optimizer": "MP914",
    "--num-layers 4 --optimizer-cuda-graph": "MP903",
    "--num-layers 4 --export-kd-teacher-load teacher/": "MP903",
    f"--num-layers 4 {FSDP} --megatron-fsdp-grad-comm-dtype bf16 --fsdp-double-buffer": "MP902",
    f"--num-layers 4 {FSDP} --data-parallel-sharding-strategy optim_grads": "MP903",
    f"--num-layers 4 {FSDP} --megatron-fsdp-version 2": "MP903",
    f"--num-layers 4 --pipeline-model-parallel-size 2 {FSDP}": "MP902",
    f"--num-layers 4 --num-experts 8 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm {FSDP}": "MP902",
}


@pytest.mark.parametrize("change", WRONG)
def test_what_a_spec_cannot_say_is_refused(change: str) -> None:
    assert WRONG[change] in refused(GPT + change).values()


def test_gpus_that_the_degrees_do_not_divide_are_refused() -> None:
    assert refused(GPT + "--num-layers 4 --pipeline-model-parallel-size 2", gpus=3) == {"--world-size": "MP914"}


def test_a_stage_may_have_the_embedding_or_the_loss_alone() -> None:
    cuts = "--num-layers 6 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 64"
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    assert imported(GPT + f"{cuts} {both}").model.pattern == "|AD|AD|AD|AD|AD|AD|"
    layout = "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    assert imported(GPT + f"{layout} E|ttttL").model.pattern == "|ADADADAD"


def test_stages_of_every_kind_of_cut() -> None:
    at = "--pipeline-model-parallel-size 2 "
    assert imported(GPT + "--num-layers 4 " + at).model.pattern == "ADAD|ADAD"
    assert imported(GPT + "--num-layers 4 " + at + "--num-layers-per-virtual-pipeline-stage 1").model.pattern == "AD|AD|AD|AD"
    assert imported(GPT + "--num-layers 4 " + at + "--decoder-first-pipeline-num-layers 1").model.pattern == "AD|ADADAD"
    assert imported(GPT + "--num-layers 3 " + at + "--account-for-loss-in-pipeline-split").model.pattern == "ADAD|AD"
    assert imported(GPT + "--num-layers 4 " + at + "--pipeline-model-parallel-layout Et|tttL").model.pattern == "AD|ADADAD"
    assert imported(GPT + "--num-layers 4 --num-experts 8 --moe-layer-freq ([0]*1+[1]*3)").model.pattern == "ADAEAEAE"
    for wrong in ("0", "False"):
        with pytest.raises(MegaplanError, match="a period from 1 to 4,096"):
            imported(GPT + f"--num-layers 4 --num-experts 8 --moe-layer-freq {wrong}")
    pattern = "--hybrid-layer-pattern M+M- --kv-lora-rank 64"
    assert imported(GPT + pattern).model.attention.kind == "mla"  # type: ignore[union-attr]
    assert imported(GPT + "--hybrid-layer-pattern M-M*M- --decoder-first-pipeline-num-layers 2 " + at).model.pattern == "MD|MAMD"


def test_data_ranks_without_a_distributed_optimizer_shard_nothing() -> None:
    spec = imported(GPT.replace("--use-distributed-optimizer", "") + "--num-layers 4", gpus=8)
    assert (spec.mesh.dp_shard, spec.host.distributed_optimizer) == (8, False)


def test_megatron_fsdp_is_sharding_that_frees_what_it_gathered() -> None:
    spec = imported(GPT + "--num-layers 4 " + FSDP, gpus=8)
    assert spec.sharding.reshard_after_forward
    assert spec.host.features == ()
    assert not imported(GPT + "--num-layers 4", gpus=8).sharding.reshard_after_forward


PRICED = [row for row in STATED if not refusals(row["arguments"], row["gpus"], row["padded_vocab_size"])]


@pytest.mark.parametrize("row", PRICED, ids=lambda row: f"{row['name'].partition('/')[2]}-{row['platform']}")
def test_an_estimate_of_an_imported_run_is_of_the_bytes_that_are_replayed(row: dict[str, Any]) -> None:
    spec = spec_of_launch(row["arguments"], row["gpus"], row["padded_vocab_size"], row["platform"], environment=row["environment"])
    inventory = build_inventory(spec)
    budget = build_budget(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))
    last = budget.of_rank(spec.mesh.world_size - 1).cells
    replayed = memory(stages_of_spec(spec)[-1])
    own = {phase: sum(cells.values()) - cells[Column.OVERHEAD] for phase, cells in last.items()}
    assert own[Phase.FORWARD_BACKWARD] == replayed.peak
    assert own[Phase.OPTIMIZER] == replayed.after_step
    counted = sum(one.elements for one in parameters(stages_of_spec(spec)[-1]).tensors)
    assert budget.of_rank(spec.mesh.world_size - 1).parameters == counted


def test_what_a_published_run_is_refused_for() -> None:
    codes = {row["name"].partition("/")[2]: set(refused_codes(row)) for row in STATED if row not in PRICED}
    assert len(codes) == 2
    assert set().union(*codes.values()) == {"MP902"}


def refused_codes(row: dict[str, Any]) -> list[str]:
    text = launch_text({**row["arguments"], "padded_vocab_size": row["padded_vocab_size"]}, row["environment"])
    return list(refused(text, gpus=row["gpus"]).values())


def test_the_command_writes_a_spec_that_estimates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.sh").write_text(LAUNCH, encoding="utf-8")
    assert run(["import", "megatron", "launch.sh", "-o", "spec.yaml"]) == 0
    assert "# Not imported: --moe-router-topk-scaling-factor 2.5" in (tmp_path / "spec.yaml").read_text(encoding="utf-8")
    assert run(["estimate", "spec.yaml"]) == 0
    assert "name: launch" in (tmp_path / "spec.yaml").read_text(encoding="utf-8")
    capsys.readouterr()
    assert run(["import", "megatron", "launch.sh", "-o", "spec.yaml"]) == 2
