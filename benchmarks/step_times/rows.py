"""Steps of published rows.

A row is a JSON object: framework, release, device, precision, mesh, batch, recompute, overlap flags, dispatcher, CUDA graphs, FSDP, and the
model's counts and widths under `arch`. The rules of the frameworks give the rest, below.
"""

from dataclasses import replace
from typing import Any

from megaplan.cost.step.frameworks import framework
from megaplan.cost.step.from_spec import step_of, timed_step
from megaplan.cost.step.workload import BatchShape, Recomputed, Sharded, Software, TimedStep
from megaplan.inventory.build import build_inventory
from step_times import specs
from step_times.hosts import dropout_of, framework_of, has_low_head, has_padded_rows, release_of

Row = dict[str, Any]
SHARDED = {"fsdp1": "fsdp1", "fsdp2": "fsdp2", "mfsdp": "megatron"}
PACKED = frozenset({"nemo", "bridge"})
"""Frameworks whose fine-tuning benchmarks pack SQuAD: NeMo's recipes by performance_mode, Bridge's by packed_sequence_specs. Automodel's
mock data are not packed."""
SQUAD_TOKENS = 180.0
"""Tokens of a packed example: contexts of SQuAD 1.1 have about 120 words, questions 10, answers 3."""
HYBRID_SHARDED = frozenset({"nemotron3-ultra"})
"""Models whose recipes of Bridge shard inside an NVLink domain and replicate across domains."""
RECOMPUTE_MODULES = frozenset({"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act"})


def step_of_row(row: Row) -> TimedStep:
    """The step that a row measured.

    Raises:
        ValueError: A hybrid's blocks do not divide into equal slots.
    """
    spec = specs.spec_of(row)
    found = timed_step(spec, build_inventory(spec), specs.spans(spec), specs.owners(spec), (software_of(row), recomputed_of(row)))
    return replace(found, batch=batch_of(row))


def launch_is_said(row: Row) -> bool:
    """True if the row's spec also has what ran it: its host, recipe and recompute give the software that the row alone gives."""
    spec, alone = specs.spec_of(row), software_of(row)
    if not framework(alone.name).releases:
        alone = alone._replace(release=None)  # no constant depends on it
    return spec.host.kind.step is not None and step_of(spec) == (alone, recomputed_of(row))


def batch_of(row: Row) -> BatchShape:
    """Batch of the row, with the length of packed documents."""
    packed = row["task"] in ("sft", "lora") and row["framework"] in PACKED
    return BatchShape(row["mbs"], row["seq"], row["nmb"], SQUAD_TOKENS if packed else 0.0)


def software_of(row: Row) -> Software:
    """Framework and launch options of the row."""
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
        attention_dropout=dropout_of(row) > 0,
        neighbours=row["framework"] == "automodel",  # its fake_balanced_gate assigns experts in order
        zero=bool(row["zero"]),
        sharded=sharded,
    )


def recomputed_of(row: Row) -> Recomputed:
    """Operations that backward computes again."""
    given = row["recompute"]
    modules = frozenset(name for name in RECOMPUTE_MODULES if given.get(name))
    return Recomputed(float(given.get("full", 0.0)), bool(given.get("sac_op")), modules)
