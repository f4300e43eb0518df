"""Settings that megaplan prices and this version of megarun does not build, or that torch would run differently.

Planning gives a note and megarun an error; both call `megarun_refuses`. One table row per feature; a row is removed when
megarun builds it.
"""

from collections.abc import Callable

from megaplan.diagnostics import diagnostic
from megaplan.dtypes import DType
from megaplan.errors import Diagnostic, Severity
from megaplan.spec.context import Locate
from megaplan.spec.document import NOWHERE
from megaplan.spec.models import Features, LatentAttention, Spec
from megaplan.spec.settings import ROUTING, SCALES, given_options

Found = Callable[[Spec], object | None]
_BUILT_DTYPES = (DType.FP32, DType.BF16)
_USED_DTYPES = (*_BUILT_DTYPES, DType.FP16)


def _indexed_bias(spec: Spec) -> object | None:
    """Refuses a relation bias with an indexer: neither the choice of keys nor its loss supports a bias, and no public model has both."""
    attention = spec.model.attention
    indexed = isinstance(attention, LatentAttention) and attention.indexer is not None and bool(attention.indexer.layers)
    return "given, with model.attention.indexer" if spec.model.features.relation_bias is not None and indexed else None


def _dtype(role: str) -> Found:
    return lambda spec: getattr(spec.precision, role) if getattr(spec.precision, role) not in _BUILT_DTYPES else None


def _params(spec: Spec) -> object | None:
    precision = spec.precision
    return precision.params if precision.params not in (_USED_DTYPES if precision.recipe is None else _BUILT_DTYPES) else None


def _families(spec: Spec) -> object | None:
    precision = spec.precision
    wrong = {letter: dtype for letter, dtype in precision.families.items() if dtype not in _USED_DTYPES}
    return ", ".join(f"{letter}: {dtype}" for letter, dtype in wrong.items()) or None


def _towers(spec: Spec) -> object | None:
    """Encoders that are only counted, or combined with settings that megarun does not build."""
    towers = spec.model.towers
    if towers is None:
        return None
    reasons = {
        "parameters that are counted": towers.stated is None or bool(towers.counted),
        "vision.encoder.rotary, without a grid": towers.stated is not None and towers.stated[0].rotary and towers.stated[0].grid is None,
        "model.features": spec.model.features != Features.plain(),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return f"given, with {', '.join(found)}" if found else None


def _other_host(spec: Spec) -> object | None:
    return None if spec.host.kind.trained else spec.host.kind.name


# Key, the unbuilt feature (None: built), and the value that megarun trains with.
NOT_BUILT_YET: tuple[tuple[str, Found, str], ...] = (
    ("model.features.relation_bias", _indexed_bias, "null, or no model.attention.indexer"),
    ("model.towers", _towers, "null, or encoders with an architecture, a grid if their positions are rotary, and no model.features"),
    ("precision.params", _params, "fp32, bf16 or, without a recipe, fp16"),
    *((f"precision.{role}", _dtype(role), "fp32 or bf16") for role in ("grads", "master", "moments", "reduce")),
    ("precision.families", _families, "fp32, bf16 or fp16"),
    ("host.name", _other_host, "megarun"),
)


BUILT_OPTIONS: frozenset[str] = frozenset(
    {
        "model.norm",
        "model.embedding_norm",
        "model.norm_placement",
        "model.parallel_layers",
        "model.streams",
        "model.attention_residuals",
        "model.post_norm_layers",
        "model.added_norm_layers",
        "model.attention.gate_bias",
        "model.linear_attention.full_gates",
        "model.short_convolution.bias",
        "model.attention.bias",
        "model.attention.qk_norm_scale",
        "model.attention.output_norm",
        "model.attention.gate",
        "model.attention.gate_width",
        "model.attention.layer_heads",
        "model.attention.value_head_dim",
        "model.attention.value_norm",
        "model.attention.values_from_keys",
        "model.attention.window_rotary_dim",
        "model.attention.indexer.shared_layers",
        "model.attention.shared_keys",
        "model.attention.output_bias",
        "model.attention.qk_norm_width",
        "model.attention.rope_scaling",
        "model.attention.rotary_dim",
        "model.attention.sinks",
        "model.attention.softmax_scale",
        "model.attention.windows",
        "model.mamba.bias",
        "model.mamba.gated_norm",
        "model.mamba.inner_norm",
        "model.mlp.bias",
        "model.mlp.inner_norm",
        "model.mlp.activation",
        "model.moe.activation",
        "model.moe.bias",
        "model.moe.capacity_drop",
        "model.moe.null_experts",
        "model.moe.expert_choice",
        "model.moe.swiglu_limit",
        "model.moe.shared_gate",
        "model.moe.score_correction",
        "model.moe.router_bias",
        "model.moe.latent_size",
        *ROUTING,
        *SCALES,
        "model.features.mtp.activation",
        "model.features.mtp.bias",
        "model.features.mtp.experts",
        "model.features.mtp.side_embeddings",
        "model.features.mtp.normed_input",
        "model.features.mtp.pattern",
        "model.towers",
    }
)
"""Options of blocks (`megaplan.spec.settings`) that megarun builds; it refuses the others."""


def megarun_refuses(spec: Spec, locate: Locate = NOWHERE.locate, severity: Severity = Severity.NOTE) -> tuple[Diagnostic, ...]:
    """Settings of a spec that megarun refuses to train: unbuilt features, and dtypes that torch would change.

    Args:
        spec: A checked spec.
        locate: Position of a key.
        severity: Note when the spec is planned, error when it is run.

    Returns:
        MP790, MP602 and MP603, as far as they apply; empty if megarun trains the spec.
    """
    return (*_unbuilt(spec, locate, severity), *_dtypes(spec, locate, severity))


def _unbuilt(spec: Spec, locate: Locate, severity: Severity) -> tuple[Diagnostic, ...]:
    rows: list[tuple[str, object, str]] = []
    rows += [(key, value, instead) for key, found, instead in NOT_BUILT_YET if (value := found(spec)) is not None]
    rows += [(option.key, option.shown, option.neutral) for option in given_options(spec.model) if option.key not in BUILT_OPTIONS]
    if not rows:
        return ()
    detail = "\n".join(f"{key} = {value}; megarun trains with {instead}" for key, value, instead in rows)
    return (diagnostic("MP790", detail, locate(rows[0][0]), severity=severity),)


def _dtypes(spec: Spec, locate: Locate, severity: Severity) -> tuple[Diagnostic, ...]:
    """Cases in which torch would sum gradients, or keep moments, in another dtype than `precision` says.

    Under a pipeline FSDP2 sums unsharded gradients of the microbatches in the reduction's dtype.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `to_accumulated_grad_if_needed`.
    """
    precision = spec.precision
    if not {precision.reduce, precision.grads, precision.moments, precision.master} <= set(_BUILT_DTYPES):
        return ()  # MP790 names them
    wrong = []
    if spec.mesh.pp > 1 and not spec.has_whole_state and precision.reduce != precision.grads:
        detail = f"precision.reduce = {precision.reduce}, precision.grads = {precision.grads}, mesh.pp = {spec.mesh.pp}"
        wrong.append(("MP602", "reduce", precision.grads, detail))
    if precision.moments != precision.master:
        detail = f"precision.moments = {precision.moments}, precision.master = {precision.master}"
        wrong.append(("MP603", "moments", precision.master, detail))
    return tuple(
        diagnostic(
            code,
            detail,
            locate(f"precision.{role}"),
            (f"megaplan split SPEC --set precision.{role}={dtype} -o PLAN",),
            severity=severity,
        )
        for code, role, dtype, detail in wrong
    )
