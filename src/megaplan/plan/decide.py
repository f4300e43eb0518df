"""The decisions that a plan records, from a spec and its cuts."""

from typing import Any

from megaplan.families.registry import FAMILIES
from megaplan.layout.ranks import Layout, Slot
from megaplan.partition.values import Cuts
from megaplan.spec.models import Spec

OWNERSHIP_ORDER = ("tp", "pp", "fsdp2", "ep")
"""Order in which degrees divide a tensor (R-40, R-55)."""


def code_order(spec: Spec, letters: str) -> tuple[str, ...]:
    """The runtime's steps to build a stage, in order, that this plan needs (R-55)."""
    policies = set(recompute_policies(spec, letters).values())
    steps = {
        "pipeline_split": spec.mesh.pp > 1,
        "tensor_parallel": spec.mesh.tp > 1,
        "recompute": policies != {"none"},
        "fsdp2_bottom_up": not spec.sharding.copies,
        "ddp": spec.sharding.copies,
        "expert_parallel": spec.mesh.ep * spec.mesh.etp > 1,
        "optimizer": True,
    }
    return tuple(step for step, needed in steps.items() if needed)


def wrap_order(spec: Spec, letters: str) -> tuple[str, ...]:
    """The modules that `fully_shard` wraps, bottom up: banks on their own shard mesh, then each block or unit of blocks, then the stage."""
    if spec.sharding.wraps_stages:
        return ("stage",)
    layers = "units" if spec.sharding.unit_layers > 1 else "blocks"
    return ("experts", layers, "stage") if any(FAMILIES[letter].banks for letter in set(letters)) else (layers, "stage")


def recompute_policies(spec: Spec, letters: str) -> dict[str, str]:
    """The policy of each letter of the pattern."""
    return {letter: spec.recompute.of(letter) for letter in sorted(set(letters))}


def stage_record(slot: Slot, letters: str) -> dict[str, Any]:
    """One line of `decisions.stages`."""
    owns = [name for name in slot.blocks if not name.startswith("layers.")]
    return {
        "slot": slot.index,
        "pp_rank": slot.pp_rank,
        "chunk": slot.chunk,
        "layers": [slot.start, slot.stop],
        "letters": letters[slot.start : slot.stop],
        "owns": owns,
        "copies": list(slot.copies),
    }


def split_record(cuts: Cuts, kept_basis: dict[str, str] | None, costs_digest: str | None = None) -> dict[str, Any]:
    """`decisions.split`; `kept_basis` replaces today's digests of the facts on which the cuts depend (see `make_plan`)."""
    certificate = cuts.certificate
    return {
        "mode": cuts.mode,
        "objective": cuts.objective,
        "reason": cuts.reason,
        "protects": list(cuts.protects),
        "decided_against": kept_basis if kept_basis is not None else cuts.decided_against,
        "costs": costs_digest,
        "certificate": {
            "objective": certificate.objective,
            "value": certificate.value,
            "lower_bound": certificate.lower_bound,
            "gap": certificate.gap,
            "optimal": certificate.optimal,
            "costs": list(certificate.costs),
            "unit": certificate.unit,
            "measures": certificate.measures,
        },
    }


def decisions_record(spec: Spec, letters: str, layout: Layout, split: dict[str, Any]) -> dict[str, Any]:
    """`decisions` as plain values, from the spec, the expanded pattern, the layout, and the decision about the split."""
    mesh, batch, schedule = spec.mesh, spec.batch, spec.schedule
    precision = spec.precision.model_dump(mode="json")
    families = {letter: str(spec.precision.of(letter)) for letter in sorted(set(letters))}
    return {
        "pattern": {"written": spec.model.pattern, "expanded": letters},
        "stages": [stage_record(slot, letters) for slot in layout.slots],
        "mesh": {
            **mesh.model_dump(mode="json", exclude=set(mesh.options)),
            "efsdp": mesh.efsdp,
            "sequence_parallel": mesh.tp > 1,
            "reshard_after_forward": spec.sharding.reshard_after_forward,
            "world_size": mesh.world_size,
        },
        "schedule": {
            "kind": schedule.kind,
            "placement": layout.placement,
            "num_microbatches": schedule.num_microbatches,
            "steps_per_update": schedule.steps_per_update,
            "micro_batch_size": batch.micro_batch_size,
            "seq_length": batch.seq_length,
            "global_batch_size": spec.global_batch_size,
            "global_batch_tokens": spec.global_batch_tokens,
        },
        "split": split,
        "precision": {**precision, "families": families},
        "optimizer": {
            **spec.optimizer.model_dump(mode="json"),
            "newton_schulz_dtype": str(spec.newton_schulz_dtype),
        },
        "recompute": recompute_policies(spec, letters),
        "ownership_order": list(OWNERSHIP_ORDER),
        "code_order": list(code_order(spec, letters)),
        "wrap_order": list(wrap_order(spec, letters)),
        "host": spec.host.model_dump(mode="json"),
    }
