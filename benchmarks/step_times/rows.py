"""Published rows as step-time workloads.

A row is a JSON object: framework, release, device, precision, mesh, batch, recompute, overlap flags, dispatcher, CUDA graphs, FSDP, and the
model's counts and widths under `arch`. What is not written there follows the framework's own rules, below.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megaplan.cost.step.frameworks import framework
from megaplan.cost.step.from_spec import step_of, workload_of
from megaplan.cost.step.low_rank import adapters
from megaplan.cost.step.workload import (
    AttentionShape,
    BatchShape,
    ExpertShape,
    Machine,
    MambaShape,
    MeshShape,
    ModelShape,
    Recomputed,
    Sharded,
    Software,
    StageShape,
    StepWorkload,
)
from megaplan.devices import load_device
from megaplan.spec.lora import Lora
from step_times import specs
from step_times.hosts import framework_of, has_low_head, has_padded_rows, lora_of, release_of

Row = dict[str, Any]
SHARDED = {"fsdp1": "fsdp1", "fsdp2": "fsdp2", "mfsdp": "megatron"}
PACKED = frozenset({"nemo", "bridge"})
"""Frameworks whose fine-tuning benchmarks pack SQuAD: NeMo's recipes by performance_mode, Bridge's by packed_sequence_specs. Automodel's
mock rows are whole."""
SQUAD_TOKENS = 180.0
"""Tokens of a packed question: contexts of SQuAD 1.1 have about 120 words, questions 10, answers 3."""
HYBRID_SHARDED = frozenset({"nemotron3-ultra"})
"""Models whose Bridge recipes shard inside an NVLink domain and replicate over domains."""
RECOMPUTE_MODULES = frozenset({"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act"})


def workload(row: Row) -> StepWorkload:
    """The step that a row measured: from a spec where one can say it."""
    spec = specs.spec_of(row)
    if isinstance(spec, str):
        return direct(row)
    found = workload_of(spec, specs.spans(spec), specs.owners(spec), (software_of(row), recomputed_of(row)))
    return replace(found, batch=batch_of(row))


def launch_is_said(row: Row) -> bool:
    """True if the row's spec also has what ran it: its host, recipe and recompute give the software that the row alone gives."""
    spec, alone = specs.spec_of(row), software_of(row)
    if isinstance(spec, str):
        return False
    if not framework(alone.name).releases:
        alone = alone._replace(release=None)  # no constant depends on it
    return spec.host.kind.step is not None and step_of(spec) == (alone, recomputed_of(row))


def spec_path(row: Row) -> str | None:
    """Reason why a row is not written as a spec; None if it is."""
    found = specs.spec_of(row)
    return found if isinstance(found, str) else None


def direct(row: Row) -> StepWorkload:
    """The same step from the row alone."""
    model, mesh = model_of(row["arch"]), mesh_of(row)
    lora = lora_of(row)
    if lora is not None:
        adapts = Lora(**lora).adapts
        model = model._replace(adapters=adapters(lora["rank"], adapts))
    return StepWorkload(model, mesh, batch_of(row), software_of(row), machine_of(row), stages_of(row, model, mesh), recomputed_of(row))


def model_of(arch: dict[str, Any]) -> ModelShape:
    """The model's dimensions."""
    window = arch.get("win") or 0
    if arch.get("mla"):
        attention = AttentionShape(
            *(arch["a"], arch["kv"], arch["nope"] + arch["rope"], arch["vd"]), arch["q_lora"] or 0, arch["kv_lora"], arch["rope"]
        )
    else:
        share = arch.get("winfrac") or 0.0
        attention = AttentionShape(arch["a"], arch["kv"], arch["hd"], arch["hd"], window=window, window_share=share, sinks=bool(window))
    experts = ExpertShape(arch["E"], arch["top"], arch["mf"], arch["shared"] or 0, arch.get("latent") or 0) if arch["nE"] else None
    mamba = MambaShape(arch["mh"], arch["mp"], arch["ms"], arch["mg"]) if arch["nM"] else None
    counts = {letter: float(arch[f"n{letter}"]) for letter in "ADEM"}
    return ModelShape(
        *(arch["h"], arch["V"], bool(arch["tied"]), bool(arch["gated"]), arch["ffn"], counts, attention, experts, mamba),
        mtp=arch.get("mtp", 0),
    )


def batch_of(row: Row) -> BatchShape:
    """Sequences of a step, and what is packed into them."""
    packed = row["task"] in ("sft", "lora") and row["framework"] in PACKED
    return BatchShape(row["mbs"], row["seq"], row["nmb"], SQUAD_TOKENS if packed else 0.0)


def mesh_of(row: Row) -> MeshShape:
    """Degrees; what is missing is 1."""
    return MeshShape(row["gpus"], *(max(1, int(row[key] or 1)) for key in ("tp", "pp", "vp", "cp", "ep", "etp", "dp")))


def software_of(row: Row) -> Software:
    """The framework and how it was launched."""
    precision, fsdp = row["precision"], row["fsdp"]
    sharded = None
    if fsdp:
        gather = 1 if row["fp8_gather"] and precision != "bf16" else 2
        inside = row["model"] in HYBRID_SHARDED
        sharded = Sharded(SHARDED[fsdp["kind"]], bool(fsdp["regather"]), fsdp["red"], gather, inside)
    return Software(
        name=framework_of(row),
        release=release_of(row),
        dtype=precision,
        linear_dtype="mxfp8" if precision == "nvfp4" and row["arch"]["nM"] else None,  # only experts of hybrids multiply in fp4
        dispatcher=row["dispatcher"] or "alltoall",
        tp_overlap=bool(row["tp_overlap"]),
        exchange_overlap=bool(row["a2a_overlap"]),
        graphs=frozenset(row["cuda_graph"]),
        compiled=bool(row["compiled"]),
        fp8_attention=bool(row.get("fp8_attention")),
        low_head=has_low_head(row),
        token_drop=bool(row["tokendrop"]),
        padded_rows=has_padded_rows(row),
        neighbours=row["framework"] == "automodel",  # its fake_balanced_gate deals experts out in order
        zero=bool(row["zero"]),
        sharded=sharded,
    )


def machine_of(row: Row) -> Machine:
    """The device of the data file, with the cluster's own adapter where the table states one."""
    found, network = Machine.of(load_device(specs.device_name(row))), specs.adapter(row)
    return replace(found, network=float(network)) if network else found


def recomputed_of(row: Row) -> Recomputed:
    """Operations that backward computes again."""
    given = row["recompute"]
    modules = frozenset(name for name in RECOMPUTE_MODULES if given.get(name))
    return Recomputed(float(given.get("full", 0.0)), bool(given.get("sac_op")), modules)


def stages_of(row: Row, model: ModelShape, mesh: MeshShape) -> tuple[StageShape, ...]:
    """Layers of the first, the middle and the last stages.

    Even where the layers divide; embedding and loss count as a layer each where that divides (126 layers on 8 or 16 stages), the loss alone
    where that does (94 layers), and DeepSeek-V3's 61 layers leave the last stage short, as the frameworks' recipes cut them.
    """
    layers, pp = row["arch"]["L"], mesh.pp
    if pp == 1:
        return (StageShape(1.0, model.counts, True, True),)
    first = middle = last = layers / pp
    if layers % pp:
        if (layers + 2) % pp == 0:
            middle = (layers + 2) / pp
            first = last = middle - 1
        elif model.counts["E"] and layers == 61:
            each = math.ceil(layers / (pp * mesh.vpp))  # whole slots, the last one with what is left and the prediction depth
            first = middle = each * mesh.vpp
            if each * (pp * mesh.vpp - 1) >= layers:
                first -= 1
            last = layers - first - middle * (pp - 2)
        elif (layers + 1) % pp == 0:
            first = middle = (layers + 1) / pp
            last = middle - 1
    if last < 0:
        first = middle = last = layers / pp
    found = [StageShape(1.0, _blocks(model, layers, first, first, first=True), embedding=True)]
    if pp > 2:
        found.append(StageShape(pp - 2.0, _blocks(model, layers, middle, first, first=False)))
    return (*found, StageShape(1.0, _blocks(model, layers, last, first, first=False), head=True))


def _blocks(model: ModelShape, layers: float, held: float, of_first: float, *, first: bool) -> dict[str, float]:
    """Blocks of a stage of `held` layers; leading dense layers of a MoE stand on the first stage."""
    counts = model.counts
    if counts["M"]:
        return {letter: count * held / layers for letter, count in counts.items()}
    if not counts["E"]:
        return {"A": held, "D": held}
    if (counts["D"] >= layers / 2 and counts["D"] > 3) or (not first and counts["D"] > of_first):
        return {"A": held, "D": held * counts["D"] / layers, "E": held * counts["E"] / layers}
    dense = min(counts["D"], held) if first else 0.0
    return {"A": held, "D": dense, "E": held - dense}
