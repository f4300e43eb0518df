"""Cells of the parity matrix, one line each.

A cell is a layout of a small model. It is compared with one process that takes the same microbatches in the same order. Its tolerance
follows from the axes it uses: none for pp alone, 2e-6 where data axes or two copies of the model sum, 1e-5 for all others.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from parity_model import INDEXED, MAMBA3, MIMO, MLA, spec_with

BITWISE, DATA_AXES, OTHER = 0.0, 2e-6, 1e-5  # max|a − b| / max|b|, per tensor, fp32
STEPS = 3
RANK_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Cell:
    """One layout.

    Attributes:
        name: Name of the test.
        mesh: Degrees above 1, `vocab_parallel`, as `mesh` in a spec.
        schedule: `schedule.kind`.
        spec: Dotted keys of the small spec replaced.
        num_microbatches: Microbatches of the whole batch, over all data ranks and schedule steps.
        updates_after: `schedule.steps_per_update`.
        spans: Layers of each slot; even by default.
        ci: Runs without `-m slow` too.
        tolerance: Largest difference; follows from the axes, unless stated.
        by_course: True if every step is judged, as random layouts are, and not the parameters after three: AdamW divides a gradient by
            its own size, so that rounding of entries near zero moves a parameter by whole steps.
    """

    name: str
    mesh: dict[str, Any] = field(default_factory=dict)
    schedule: str = "1f1b"
    spec: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int = 4
    updates_after: int = 1
    spans: list[list[int]] | None = None
    ci: bool = False
    tolerance: float | None = None
    by_course: bool = False

    @property
    def world_size(self) -> int:
        return prod(self.mesh.get(axis, 1) for axis in RANK_AXES)

    @property
    def axes(self) -> str:
        """Name of a failed cell: `pp 2, vpp 2, tp 2, zbv`."""
        return ", ".join([*(f"{axis} {degree}" for axis, degree in self.mesh.items()), self.schedule])

    @property
    def bound(self) -> float:
        """The metric's tolerance. Copies of a block on several stages sum in another order than one process does, and so do kernels."""
        if self.tolerance is not None:
            return self.tolerance
        if "host.kernels" in self.spec:
            return OTHER
        several = self.spec.keys() & {"model.features.mtp", "model.features.relation_bias"}
        copied = (self.spec.get("model.tie_embeddings", False) or several) and self.mesh.get("pp", 1) > 1
        if copied or any(self.mesh.get(axis, 1) > 1 for axis in ("cp", "tp", "ep", "etp")):
            return OTHER
        summed = self.schedule == "dualpipe" or any(self.mesh.get(axis, 1) > 1 for axis in ("dp_replicate", "dp_shard"))
        return DATA_AXES if summed else BITWISE

    @cached_property
    def case(self) -> dict[str, Any]:
        """Values that the worker reads."""
        data_ranks = self.mesh.get("dp_replicate", 1) * self.mesh.get("dp_shard", 1)
        count, rest = divmod(self.num_microbatches, data_ranks * self.updates_after)
        if rest:
            raise ValueError(
                f"{self.name}: {self.num_microbatches} microbatches do not fall evenly on {data_ranks} data ranks and all steps"
            )
        schedule = {"kind": self.schedule, "num_microbatches": count, "steps_per_update": self.updates_after}
        spec = spec_with({**self.spec, "mesh": self.mesh, "schedule": schedule})
        slots, layers = self.mesh.get("pp", 1) * self.mesh.get("vpp", 1), spec["model"]["num_layers"]
        even = [[index * layers // slots, (index + 1) * layers // slots] for index in range(slots)]
        return {"spec": spec, "spans": self.spans or even, "steps": STEPS}

    @cached_property
    def reference(self) -> dict[str, Any]:
        """The same model and batch on one process, with the plain operations."""
        schedule = {"kind": "1f1b", "num_microbatches": self.num_microbatches}
        reference = {
            key: value for key, value in self.spec.items() if not key.startswith(("sharding.", "host.kernels", "recompute", "pools"))
        }
        spec = spec_with({**reference, "schedule": schedule})
        # looped BFS runs its backwards, whose gradients are summed, from a step's last microbatch to its first
        reversed_parts = self.updates_after if self.schedule == "looped_bfs" else 0
        return {"spec": spec, "spans": [[0, spec["model"]["num_layers"]]], "steps": STEPS, "reversed_parts": reversed_parts}


def pattern(pattern: str, num_layers: int = 8, **more: Any) -> dict[str, Any]:
    return {"model.pattern": pattern, "model.num_layers": num_layers, **{f"model.{key}": value for key, value in more.items()}}


CHOOSING = pattern("AE", attention=INDEXED)
ROTATING = {"model.mamba": MIMO}
TIED = {"model.tie_embeddings": True}
POOLS = {"pools": [{"count": 2, "device": {"name": "a100-80gb"}}]}
KERNELS = {"host.kernels": "triton"}
RESHARD = {"sharding.reshard_after_forward": True}
RECOMPUTED = {"recompute": {"default": "full", "blocks": {"M": "selective", "E": "selective"}}}
RECOMPUTED_ATTENTION = {"recompute": {"default": "full", "blocks": {"E": "selective"}}}
SELECTIVE = {"recompute": {"default": "selective"}}
LATENT = pattern("AEAM", attention=MLA)
FEW_TOKENS = {"model.moe.num_experts": 16, "model.moe.top_k": 1, "batch": {"micro_batch_size": 1, "seq_length": 4}}
# 2 · 20 rows of up, 2 · 32 of down: three shards end inside an expert, the last ones short, and one has rows of both
TWO_EXPERTS = {"model.moe.num_experts": 2, "model.moe.ffn_hidden_size": 20}
BF16 = {"precision.params": "bf16"}
ADAMW = {"optimizer.matrix": "adamw"}
# AdamW divides by |gradient|: where an entry is near zero, its rounding becomes a step. A small rate makes steps small relative to weights;
# a bias that starts at zero is only steps.
GENTLE, UNBIASED = {"training.learning_rate": 1.0e-4}, {"model.mamba.conv_bias": False}
BF16_GRADIENTS = BF16 | {"precision.grads": "bf16", "precision.reduce": "bf16"}

V2, V4 = {"pp": 2, "vpp": 2}, {"pp": 4, "vpp": 2}
DENSE = pattern("AD")
EXPERTS = pattern("AE")
STATES = pattern("MMRM")
T2, T4 = {"tp": 2}, {"tp": 4}
T2V, T4V = {"tp": 2, "vocab_parallel": True}, {"tp": 4, "vocab_parallel": True}
HEADS = {"model.attention.num_kv_heads": 4}
NORMED = {"model.attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "qk_norm": True, "window_size": 6}}
BIASED = {
    "model.attention": {
        "kind": "gqa",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "bias": True,
        "nope_layers": [1],
        "rope_theta": 10.0,
    }
}
DIRECT = pattern("AD", attention={**MLA, "q_lora_rank": None})
C2, C4 = {"cp": 2}, {"cp": 4}
LONG = {"batch.seq_length": 32}
E2, E4, D4 = {"dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 4}, {"dp_shard": 4, "ep": 2}
TOP_1 = FEW_TOKENS | {"model.moe.normalize_top_k": False}  # normalised, its weight is 1 and the router's gradient rounding
PACKED = {"data.packing": "documents"}
FEW_WORDS = PACKED | {"model.vocab_size": 16}  # a word that is last in all its documents has the gradient zero, which AdamW makes a step of
UNEVEN = [[0, 1], [1, 4], [4, 5], [5, 8]]

ROUTED = {"model.moe.balance_loss_coefficient": 0.05, "model.moe.z_loss_coefficient": 0.02}
LIMITED = {"model.moe.capacity_factor": 0.7}
NULLS = {"model.moe.null_experts": 3}
CHOOSES = {"model.moe.expert_choice": True, "model.moe.capacity_factor": 0.75}
BALANCED = {"model.moe.balance_loss_coefficient": 0.05}

CELLS = [
    # one pipeline axis
    Cell("gpipe-pp2", {"pp": 2}, "gpipe"),
    Cell("gpipe-pp4-uneven", {"pp": 4}, "gpipe", spans=UNEVEN),
    Cell("gpipe-pp2-recompute", {"pp": 2}, "gpipe", RECOMPUTED),
    Cell("1f1b-pp2", {"pp": 2}),
    Cell("1f1b-pp2-reshard", {"pp": 2}, spec=RESHARD),
    Cell("1f1b-pp4-uneven", {"pp": 4}, spans=UNEVEN),
    Cell("1f1b-pp4-pools", {"pp": 4}, spec=POOLS, spans=UNEVEN),
    Cell("1f1b-pp2-latent", {"pp": 2}, spec=LATENT),
    Cell("1f1b-pp2-indexer", {"pp": 2}, spec=CHOOSING, ci=True),
    Cell("1f1b-pp2-mamba3", {"pp": 2}, spec=ROTATING),
    Cell("1f1b-pp2-tied", {"pp": 2}, spec=TIED),
    Cell("1f1b-pp2-bf16", {"pp": 2}, spec=BF16),
    Cell("1f1b-pp2-bf16-gradients", {"pp": 2}, spec=BF16_GRADIENTS),
    Cell("1f1b-pp8-dense", {"pp": 8}, spec=DENSE, num_microbatches=8),
    Cell("looped-bfs-pp2-vpp2", V2, "looped_bfs"),
    Cell("interleaved-pp2-vpp2", V2, "interleaved_1f1b", ci=True),
    Cell("interleaved-pp2-vpp4", {"pp": 2, "vpp": 4}, "interleaved_1f1b"),
    Cell("interleaved-pp2-vpp2-uneven", V2, "interleaved_1f1b", spans=UNEVEN),
    Cell("interleaved-pp2-vpp2-recompute", V2, "interleaved_1f1b", RECOMPUTED),
    Cell("interleaved-pp2-vpp2-recompute-reshard", V2, "interleaved_1f1b", RECOMPUTED | RESHARD),
    Cell("interleaved-pp2-vpp2-tied", V2, "interleaved_1f1b", TIED),
    Cell("interleaved-pp2-vpp2-bf16-gradients", V2, "interleaved_1f1b", BF16_GRADIENTS),
    # split backward
    Cell("zero-bubble-pp2", {"pp": 2}, "interleaved_zero_bubble"),
    Cell("zero-bubble-pp2-vpp2", V2, "interleaved_zero_bubble", ci=True),
    Cell("zero-bubble-pp2-vpp2-bf16", V2, "interleaved_zero_bubble", BF16),
    Cell("zero-bubble-pp2-vpp2-recompute", V2, "interleaved_zero_bubble", RECOMPUTED | RESHARD),
    Cell("zero-bubble-pp4-vpp2", V4, "interleaved_zero_bubble", num_microbatches=8),
    Cell("zbv-pp2", V2, "zbv"),
    Cell("zbv-pp2-few-microbatches", V2, "zbv", num_microbatches=2),
    Cell("zbv-pp2-reshard", V2, "zbv", RESHARD),
    Cell("zbv-pp2-recompute", V2, "zbv", RECOMPUTED),
    Cell("zbv-pp2-selective-reshard", V2, "zbv", SELECTIVE | RESHARD),
    Cell("zbv-pp2-tied", V2, "zbv", TIED),
    Cell("zbv-pp2-latent", V2, "zbv", LATENT),
    Cell("zbv-pp2-states", V2, "zbv", STATES),
    Cell("zbv-pp2-indexer-selective-reshard", V2, "zbv", CHOOSING | SELECTIVE | RESHARD),
    Cell("zbv-pp2-mamba3", V2, "zbv", ROTATING),
    Cell("zbv-pp2-mamba3-selective-reshard", V2, "zbv", ROTATING | SELECTIVE | RESHARD),
    Cell("zbv-pp2-bf16-reshard", V2, "zbv", BF16 | RESHARD),
    Cell("zbv-pp2-bf16-gradients", V2, "zbv", BF16_GRADIENTS),
    Cell("zbv-pp4", V4, "zbv", num_microbatches=8),
    Cell("dualpipev-pp2", V2, "dualpipev", ci=True),
    Cell("dualpipev-pp2-recompute", V2, "dualpipev", RECOMPUTED),
    Cell("dualpipev-pp2-experts-tied", V2, "dualpipev", EXPERTS | TIED),
    Cell("dualpipev-pp2-bf16", V2, "dualpipev", BF16),
    Cell("dualpipev-pp4", V4, "dualpipev", num_microbatches=8),
    # data axes
    Cell("dp2", {"dp_shard": 2}),
    Cell("dp2-reshard", {"dp_shard": 2}, spec=RESHARD),
    Cell("dp2-latent", {"dp_shard": 2}, spec=LATENT),
    Cell("dp2-indexer", {"dp_shard": 2}, spec=CHOOSING),
    Cell("1f1b-pp2-indexer-steps2", {"pp": 2}, spec=CHOOSING, updates_after=2),
    Cell("dp2-mamba3", {"dp_shard": 2}, spec=ROTATING),
    Cell("dp2-idle-experts", {"dp_shard": 2}, spec=FEW_TOKENS, num_microbatches=2),
    Cell("dp2-recompute", {"dp_shard": 2}, spec=RECOMPUTED),
    Cell("dp2-recompute-reshard", {"dp_shard": 2}, spec=RECOMPUTED | RESHARD),
    Cell("hsdp-2x1", {"dp_replicate": 2}),
    Cell("hsdp-2x2", {"dp_replicate": 2, "dp_shard": 2}, ci=True),
    # pipeline and data axes
    Cell("1f1b-pp2-dp2", {"pp": 2, "dp_shard": 2}),
    Cell("1f1b-pp2-dp2-tied", {"pp": 2, "dp_shard": 2}, spec=TIED),
    Cell("zbv-pp2-dp2-pools", V2 | {"dp_shard": 2}, "zbv", POOLS, ci=True),
    Cell("gpipe-pp2-hsdp-2x2", {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, "gpipe"),
    Cell("interleaved-pp2-vpp2-dp2", V2 | {"dp_shard": 2}, "interleaved_1f1b"),
    Cell("zero-bubble-pp2-vpp2-dp2-reshard", V2 | {"dp_shard": 2}, "interleaved_zero_bubble", RESHARD),
    Cell("zbv-pp2-dp2", V2 | {"dp_shard": 2}, "zbv"),
    Cell("zbv-pp2-dp2-tied-recompute", V2 | {"dp_shard": 2}, "zbv", TIED | RECOMPUTED),
    Cell("zbv-pp2-hsdp-2x2", V2 | {"dp_replicate": 2, "dp_shard": 2}, "zbv"),
    Cell("zbv-pp4-dp2", V4 | {"dp_shard": 2}, "zbv", num_microbatches=8),
    Cell("dualpipev-pp2-dp2", V2 | {"dp_shard": 2}, "dualpipev", num_microbatches=8),
    # several schedule steps an update
    Cell("dp2-steps2", {"dp_shard": 2}, updates_after=2),
    Cell("gpipe-pp2-steps2", {"pp": 2}, "gpipe", updates_after=2),
    Cell("1f1b-pp2-steps2", {"pp": 2}, updates_after=2),
    Cell("1f1b-pp2-steps2-bf16-gradients", {"pp": 2}, spec=BF16_GRADIENTS, updates_after=2),
    Cell("1f1b-pp4-steps3-reshard-recompute", {"pp": 4}, spec=RESHARD | RECOMPUTED, num_microbatches=12, updates_after=3),
    Cell("looped-bfs-pp2-vpp2-steps2", V2, "looped_bfs", updates_after=2),
    Cell("interleaved-pp2-vpp2-steps2-reshard", V2, "interleaved_1f1b", RESHARD, updates_after=2),
    Cell("zero-bubble-pp2-vpp2-steps2", V2, "interleaved_zero_bubble", updates_after=2),
    Cell("zbv-pp2-steps3", V2, "zbv", num_microbatches=6, updates_after=3),
    Cell("dualpipev-pp2-steps2", V2, "dualpipev", num_microbatches=8, updates_after=2),
    Cell("1f1b-pp2-dp2-steps2-tied", {"pp": 2, "dp_shard": 2}, spec=TIED, num_microbatches=8, updates_after=2),
    Cell("gpipe-pp2-hsdp-2x2-steps2", {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, "gpipe", num_microbatches=8, updates_after=2),
    Cell("zbv-pp2-dp2-steps2-reshard", V2 | {"dp_shard": 2}, "zbv", RESHARD, num_microbatches=8, updates_after=2, ci=True),
    Cell("1f1b-pp2-tp2-ep2-steps2", T2 | {"pp": 2, "ep": 2}, updates_after=2),
    Cell("1f1b-pp2-steps2-router-losses", {"pp": 2}, spec=EXPERTS | ROUTED, updates_after=2),
    # tensor and sequence parallelism
    Cell("tp2-attention-biased", T2, spec=pattern("A", 2) | BIASED),
    Cell("tp2-attention-normed", T2, spec=pattern("A", 2) | NORMED),
    Cell("tp4-attention", T4, spec=pattern("A", 2) | HEADS),
    Cell("tp2-latent", T2, spec=pattern("A", 3, attention=MLA)),
    Cell("tp2-indexer", T2, spec=pattern("A", 3, attention=INDEXED)),
    Cell("1f1b-pp2-tp2-dp2-indexer-recompute", T2 | {"pp": 2, "dp_shard": 2}, spec=CHOOSING | RECOMPUTED_ATTENTION | RESHARD),
    Cell("tp4-latent-direct-queries", T4, spec=DIRECT),
    Cell("tp2-mamba", T2, spec=pattern("M", 2)),
    Cell("tp4-mamba", T4, spec=pattern("M", 2)),
    Cell("tp2-mamba3", T2, spec=pattern("M", 2, mamba=MIMO), ci=True),
    Cell("tp4-mamba3-single", T4, spec=pattern("M", 2, mamba=MAMBA3)),
    Cell("tp2-recurrent", T2, spec=pattern("R", 2)),
    Cell("tp4-recurrent", T4, spec=pattern("R", 2)),
    Cell("tp2-dense", T2, spec=pattern("D", 2)),
    Cell("tp4-dense-gelu", T4, spec=pattern("D", 2, mlp={"ffn_hidden_size": 40, "activation": "gelu"})),
    Cell("tp2-experts", T2, spec=pattern("E", 2)),
    Cell("tp4-experts", T4, spec=pattern("E", 2)),
    Cell("tp2", T2),
    Cell("tp4", T4, spec=HEADS),
    Cell("tp2-adamw", T2, spec=ADAMW | GENTLE),
    Cell("tp2-tied", T2, spec=TIED),
    Cell("tp2-vocabulary", T2V, spec=DENSE, ci=True),
    Cell("tp4-vocabulary-tied", T4V, spec=TIED | HEADS),
    Cell("tp2-recompute", T2, spec=RECOMPUTED),
    Cell("tp2-selective", T2, spec=SELECTIVE),
    Cell("tp2-recompute-latent", T2, spec=LATENT | SELECTIVE | UNBIASED),
    Cell("tp2-dp2", T2 | {"dp_shard": 2}),
    Cell("tp2-dp2-reshard-recompute", T2 | {"dp_shard": 2}, spec=RESHARD | RECOMPUTED),
    Cell("tp2-hsdp-2x2-vocabulary", T2V | {"dp_replicate": 2, "dp_shard": 2}, spec=DENSE),
    Cell("tp4-dp2-latent", T4 | {"dp_shard": 2}, spec=LATENT | UNBIASED),
    Cell("1f1b-pp2-tp2", T2 | {"pp": 2}),
    Cell("1f1b-pp2-tp2-vocabulary-tied", T2V | {"pp": 2}, spec=TIED),
    Cell("1f1b-pp2-tp2-dp2-reshard", T2 | {"pp": 2, "dp_shard": 2}, spec=RESHARD),
    Cell("interleaved-pp2-vpp2-tp2-recompute", T2 | V2, "interleaved_1f1b", RECOMPUTED),
    Cell("1f1b-pp2-tp2-dp2-mamba3-recompute", T2 | {"pp": 2, "dp_shard": 2}, spec=ROTATING | RECOMPUTED | RESHARD),
    Cell("zero-bubble-pp2-vpp2-tp2-mamba3", T2 | V2, "interleaved_zero_bubble", ROTATING),
    Cell("zero-bubble-pp2-vpp2-tp2", T2 | V2, "interleaved_zero_bubble"),
    Cell("zbv-pp2-tp2-vocabulary", T2V | V2, "zbv"),
    Cell("zbv-pp2-tp2-dp2-recompute", T2 | V2 | {"dp_shard": 2}, "zbv", RECOMPUTED | RESHARD),
    Cell("dualpipev-pp2-tp4", T4 | V2, "dualpipev", HEADS),
    # expert parallelism
    Cell("ep2", E2),
    Cell("ep4", E4),
    Cell("ep2-dp4", D4),
    Cell("ep4-dp8", {"dp_shard": 8, "ep": 4}, num_microbatches=8),
    Cell("ep2-relu2-alone", E2, spec=pattern("E", 2, moe={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "activation": "relu2"})),
    Cell("ep2-dp4-empty-shards", D4, spec={"model.moe.num_experts": 2}),
    Cell("ep2-idle-experts", E2, spec=TOP_1, num_microbatches=2),
    Cell("ep2-dp4-adamw", D4, spec=ADAMW | GENTLE),
    Cell("ep4-tied", E4, spec=EXPERTS | TIED),
    Cell("ep2-latent", E2, spec=LATENT),
    Cell("ep2-dp4-reshard", D4, spec=RESHARD),
    Cell("ep2-dp4-selective", D4, spec=SELECTIVE),
    Cell("ep2-dp4-recompute-reshard", D4, spec=RECOMPUTED | RESHARD, ci=True),
    Cell("ep2-gathering", E2, spec=KERNELS),
    Cell("ep2-dp4-gathering-recompute-reshard", D4, spec=KERNELS | RECOMPUTED | RESHARD),
    Cell("ep2-hsdp-2x2", E2 | {"dp_replicate": 2}),
    Cell("ep2-hsdp-2x4-reshard", D4 | {"dp_replicate": 2}, spec=RESHARD, num_microbatches=8),
    Cell("1f1b-pp2-ep2", E2 | {"pp": 2}),
    # a capacity: rows that each rank drops are those that one process drops of the same microbatch, where no axis divides its tokens
    Cell("ep2-capacity", E2, spec=EXPERTS | LIMITED, ci=True),
    Cell("ep4-capacity-by-position-gathering", E4, spec=EXPERTS | LIMITED | {"model.moe.capacity_drop": "position"} | KERNELS),
    Cell("1f1b-pp2-ep2-capacity-recompute", E2 | {"pp": 2}, spec=EXPERTS | LIMITED | RECOMPUTED),
    Cell("zbv-pp2-capacity", V2, "zbv", EXPERTS | LIMITED | ROUTED),
    Cell("tp2-ep2-dp2-capacity-of-all", T2 | E2, spec=EXPERTS | {"model.moe.capacity_factor": 4.0}),
    Cell("ep2-null-experts", E2, spec=EXPERTS | NULLS | ROUTED, ci=True),
    Cell("1f1b-pp2-null-experts-recompute", {"pp": 2}, spec=EXPERTS | NULLS | RECOMPUTED),
    Cell("tp2-ep2-dp2-null-experts", T2 | E2, spec=EXPERTS | NULLS),
    Cell("cp2-ep2-null-experts-gathering", C2 | {"ep": 2}, spec=EXPERTS | NULLS | KERNELS),
    Cell("ep2-expert-choice", E2, spec=EXPERTS | CHOOSES, ci=True),
    Cell("zbv-pp2-ep2-expert-choice-gathering", V2 | E2, "zbv", EXPERTS | CHOOSES | KERNELS),
    Cell("cp2-capacity-of-all", C2, spec=EXPERTS | {"model.moe.capacity_factor": 4.0}),
    Cell("1f1b-pp2-ep2-dp4-reshard-recompute", D4 | {"pp": 2}, spec=RECOMPUTED | RESHARD, num_microbatches=8),
    Cell("gpipe-pp2-ep2-hsdp-2x2", E2 | {"pp": 2, "dp_replicate": 2}, "gpipe"),
    Cell("interleaved-pp2-vpp2-ep4", V2 | E4, "interleaved_1f1b", num_microbatches=8),
    Cell("zero-bubble-pp2-vpp2-ep2-adamw", V2 | E2, "interleaved_zero_bubble", ADAMW | GENTLE),
    Cell("zbv-pp2-ep2-recompute-reshard", V2 | E2, "zbv", RECOMPUTED | RESHARD),
    Cell("dualpipev-pp2-ep2-experts", V2 | E2, "dualpipev", EXPERTS, num_microbatches=8),
    # head and loss in one operation: the last stage returns its loss
    Cell("joined-loss-zbv-pp2-tied", V2, "zbv", DENSE | TIED | KERNELS),
    Cell("joined-loss-hsdp-2x2-reshard", {"dp_replicate": 2, "dp_shard": 2}, spec=DENSE | KERNELS | RESHARD),
    Cell("joined-loss-interleaved-pp2-vpp2-steps2", V2, "interleaved_1f1b", DENSE | KERNELS, updates_after=2),
    Cell("joined-loss-tp2", T2, spec=DENSE | KERNELS),
    Cell("joined-loss-tp4-vocabulary-tied", T4V, spec=DENSE | HEADS | TIED | KERNELS),
    Cell("joined-loss-tp2-vocabulary-zbv-packed", T2V | V2, "zbv", DENSE | FEW_WORDS | KERNELS),
    Cell("joined-loss-cp2-pp2", C2 | {"pp": 2}, spec=DENSE | KERNELS),
    # context parallelism
    Cell("cp2-attention", C2, spec=pattern("A", 2) | NORMED),
    Cell("cp4-latent-nope", C4, spec=pattern("A", 2, attention={**MLA, "nope_layers": [1], "window_size": 6})),
    Cell("cp2-indexer", C2, spec=pattern("A", 3, attention=INDEXED)),
    Cell("cp4-indexer-window", C4, spec=pattern("A", 3, attention={**INDEXED, "window_size": 9})),
    Cell("cp2-pp2-indexer-selective", C2 | {"pp": 2}, spec=CHOOSING | SELECTIVE),
    Cell("cp2-tp2-dp2-indexer-recompute", C2 | T2 | {"dp_shard": 2}, spec=CHOOSING | RECOMPUTED_ATTENTION),
    Cell("packed-cp2-ep2-indexer", C2 | {"ep": 2}, spec=FEW_WORDS | CHOOSING),
    Cell("cp2-dense-recompute", C2, spec=DENSE | RECOMPUTED),
    Cell("cp4-experts-tied", C4, spec=EXPERTS | TIED),
    Cell("cp2-tp2-dp2-latent", C2 | T2 | {"dp_shard": 2}, spec=pattern("AED", attention=MLA) | UNBIASED),
    Cell("cp2-pp2-vocabulary-zbv", C2 | T2V | V2, "zbv", DENSE),
    Cell("cp2-ep4-dp2-reshard", C2 | {"dp_shard": 2, "ep": 4}, spec=EXPERTS | RESHARD | SELECTIVE),
    Cell("cp2-mamba", C2, spec=pattern("M", 2)),
    Cell("cp4-mamba-one-group", C4, spec=pattern("M", 2) | LONG | {"model.mamba.num_groups": 1}, by_course=True),
    Cell("cp4-recurrent", C4, spec=pattern("R", 2) | LONG),
    Cell("cp2-selective", C2, spec=SELECTIVE),
    Cell("cp2-mamba3", C2, spec=pattern("M", 2, mamba=MIMO) | GENTLE),
    Cell("cp4-mamba3-single", C4, spec=pattern("M", 2, mamba=MAMBA3) | LONG),
    Cell("cp4-mamba3-one-group", C4, spec=pattern("M", 2, mamba={**MIMO, "num_groups": 1}) | LONG | GENTLE),
    Cell("cp2-mamba3-short-chunks-tp2", C2 | T2, spec=pattern("M", 2, mamba={**MIMO, "chunk_size": 2, "save_every": 3})),
    Cell("cp2-pp2-mamba3", C2 | {"pp": 2}, spec=ROTATING),
    Cell("cp2-zbv-mamba3-selective-reshard", C2 | V2, "zbv", ROTATING | SELECTIVE | RESHARD),
    Cell("cp2-tp2-dp2-mamba3-recompute", C2 | T2 | {"dp_shard": 2}, spec=ROTATING | RECOMPUTED),
    Cell("cp4-pp2-mamba3-gpipe", C4 | {"pp": 2}, "gpipe", ROTATING | LONG),
    Cell("packed-cp2-pp2-mamba3", C2 | {"pp": 2}, spec=FEW_WORDS | pattern("M", 4, mamba=MIMO)),
    Cell("packed-cp4-mamba3-selective", C4, spec=FEW_WORDS | LONG | pattern("M", 3, mamba=MIMO) | SELECTIVE),
    Cell("cp2", C2, ci=True),
    Cell("cp4-tied", C4, spec=LONG | TIED),
    Cell("cp2-recurrent-full", C2, spec=pattern("AR", 4) | {"recompute": {"default": "full"}}),
    Cell("cp2-tp2-states", C2 | T2, spec=STATES | GENTLE),
    Cell("cp2-pp2-zbv-dp2", C2 | V2 | {"dp_shard": 2}, "zbv"),
    Cell("cp2-ep4-tp2-pp2", C2 | T2 | {"ep": 4, "pp": 2}),
    Cell("cp2-hsdp-2x2-adamw", C2 | {"dp_replicate": 2, "dp_shard": 2}, spec=ADAMW | GENTLE),
    Cell("cp2-ep2-router-losses", C2 | {"ep": 2}, spec=EXPERTS | ROUTED),
    Cell("cp2-ep2-pp2", C2 | {"ep": 2, "pp": 2}, spec=pattern("AED")),
    # expert and tensor parallelism: ep borrows tp's ranks first
    Cell("tp2-ep2", T2 | {"ep": 2}),
    Cell("tp2-ep2-dp2", T2 | E2),
    Cell("tp2-ep4-dp2", T2 | {"dp_shard": 2, "ep": 4}, spec=SELECTIVE),
    Cell("tp4-ep2-dp2-reshard", T4 | E2, spec=HEADS | RESHARD),
    Cell("tp2-ep2-hsdp-2x2-adamw", T2 | E2 | {"dp_replicate": 2}, spec=ADAMW | GENTLE),
    Cell("1f1b-pp2-tp2-ep4-dp2", T2 | {"pp": 2, "dp_shard": 2, "ep": 4}, spec=RECOMPUTED),
    Cell("zbv-pp2-tp2-ep2-vocabulary", T2V | V2 | {"ep": 2}, "zbv"),
    # more shards than experts
    Cell("dp3-two-experts", {"dp_shard": 3}, spec=TWO_EXPERTS | EXPERTS, num_microbatches=6),
    Cell("dp4-two-experts-adamw-reshard", {"dp_shard": 4}, spec=TWO_EXPERTS | ADAMW | GENTLE | RESHARD | RECOMPUTED),
    Cell("dp4-ep2-two-experts", {"dp_shard": 4, "ep": 2}, spec=TWO_EXPERTS | EXPERTS),
    Cell("hsdp-2x3-two-experts", {"dp_replicate": 2, "dp_shard": 3}, spec=TWO_EXPERTS | GENTLE, num_microbatches=6),
    Cell("1f1b-pp2-dp3-two-experts-reshard", {"pp": 2, "dp_shard": 3}, spec=TWO_EXPERTS | EXPERTS | RESHARD, num_microbatches=6),
    Cell("zbv-pp2-dp4-two-experts", V2 | {"dp_shard": 4}, "zbv", TWO_EXPERTS | EXPERTS, num_microbatches=8),
    Cell("tp2-dp3-ep2-two-experts", T2 | {"dp_shard": 3, "ep": 2}, spec=TWO_EXPERTS | GENTLE, num_microbatches=6),
    # losses of the routers, from every stage
    Cell("router-losses-gpipe-pp2", {"pp": 2}, "gpipe", EXPERTS | ROUTED),
    Cell("router-losses-1f1b-pp2-dp2", {"pp": 2, "dp_shard": 2}, spec=ROUTED),
    Cell("router-losses-1f1b-pp4", {"pp": 4}, spec=EXPERTS | ROUTED | SELECTIVE),
    Cell("router-losses-looped-bfs-pp2-vpp2", V2, "looped_bfs", EXPERTS | BALANCED),
    Cell("router-losses-interleaved-pp2-vpp2", V2, "interleaved_1f1b", EXPERTS | ROUTED),
    Cell("router-losses-zero-bubble-pp2-vpp2", V2, "interleaved_zero_bubble", EXPERTS | ROUTED),
    Cell("router-losses-zbv-pp2", V2, "zbv", EXPERTS | ROUTED, ci=True),
    Cell("router-losses-dualpipev-pp2", V2, "dualpipev", EXPERTS | ROUTED),
    Cell("router-losses-hsdp-2x2", {"dp_replicate": 2, "dp_shard": 2}, spec=EXPERTS | ROUTED),
    Cell("router-losses-tp2", T2, spec=EXPERTS | ROUTED),
    Cell("router-losses-ep2", E2, spec=EXPERTS | BALANCED),
    Cell("router-losses-ep4-recompute-reshard", E4, spec=EXPERTS | ROUTED | RECOMPUTED | RESHARD),
    Cell("router-losses-tp2-ep4-dp2-pp2", T2 | {"dp_shard": 2, "ep": 4, "pp": 2}, spec=EXPERTS | ROUTED),
]
