"""Parameters of E blocks: router, expert banks, shared expert."""

from megaplan.families.dense.tensors import mlp_matrices
from megaplan.families.moe.section import MixtureOfExperts
from megaplan.inventory.makers import norm, replicated
from megaplan.inventory.tensors import Group, Init, Owner, ParamTensor
from megaplan.scalars import GATED

OWN_NORMS = ("expert_norm", "expert_post_norm", "shared_post_norm")
"""Norms of `own_norms` with a scale: before the experts, and on the outputs of routed and shared experts."""


def moe_tensors(moe: MixtureOfExperts, hidden_size: int, _variant: float | None = None) -> tuple[ParamTensor, ...]:
    """Tensors of one E block, its pre-norm included.

    A bank is a stack of E matrices in dim 0: EP shards the stack, ETP the expert width, and Muon treats each expert's matrix separately.
    The router is replicated (R-16): every rank scores its tokens against all experts. The projections to and from a latent are replicated
    too.
    """
    experts, width, rows = moe.num_experts, moe.ffn_hidden_size, moe.row_width(hidden_size)
    up_names = ("gate_proj", "up_proj") if moe.activation in GATED else ("up_proj",)
    shared = mlp_matrices(hidden_size, moe.shared_ffn_hidden_size, moe.activation, "shared.") if moe.shared_ffn_hidden_size else ()
    return (
        norm("norm.weight", hidden_size),
        replicated("router.weight", (moe.num_choices, hidden_size), Group.OTHER),
        *_router_options(moe),
        *(_own_norms(moe, hidden_size) if moe.own_norms else ()),
        *(_bank(f"experts.{name}", (experts, width, rows), Init.NORMAL, 1) for name in up_names),
        _bank("experts.down_proj", (experts, rows, width), Init.NORMAL_OUT, 2),
        *(_bank_biases(up_names, experts, width, rows) if moe.bias else ()),
        *(_latent_projections(moe.latent_size, hidden_size) if moe.latent_size is not None else ()),
        *shared,
        *((replicated("shared_gate.weight", (1, hidden_size), Group.OTHER),) if moe.shared_gate else ()),
    )


def _router_options(moe: MixtureOfExperts) -> tuple[ParamTensor, ...]:
    names = {"router.bias": moe.router_bias, "router.correction": moe.score_correction}
    return tuple(replicated(name, (moe.num_choices,), Group.OTHER, Init.ZEROS) for name, given in names.items() if given)


def _own_norms(moe: MixtureOfExperts, hidden_size: int) -> tuple[ParamTensor, ...]:
    norms = (norm(f"{name}.weight", hidden_size) for name in OWN_NORMS)
    return *norms, norm("router_scale", hidden_size), norm("expert_scale", moe.num_experts)


def _bank_biases(up_names: tuple[str, ...], experts: int, width: int, rows: int) -> tuple[ParamTensor, ...]:
    """Biases with one row per expert; ETP shards the ones along the width."""
    shapes = {**{f"experts.{name}_bias": ((experts, width), 1) for name in up_names}, "experts.down_proj_bias": ((experts, rows), None)}
    return tuple(
        ParamTensor(name, shape, Owner.EXPERT_PARALLEL, Group.OTHER, Init.ZEROS, dim, num_matrices=experts)
        for name, (shape, dim) in shapes.items()
    )


def _latent_projections(latent: int, hidden_size: int) -> tuple[ParamTensor, ...]:
    return (
        replicated("latent_down.weight", (latent, hidden_size), Group.MATRIX),
        replicated("latent_up.weight", (hidden_size, latent), Group.MATRIX, Init.NORMAL_OUT),
    )


def _bank(name: str, shape: tuple[int, int, int], init: Init, etp_dim: int) -> ParamTensor:
    return ParamTensor(name, shape, Owner.EXPERT_PARALLEL, Group.MATRIX, init, etp_dim, num_matrices=shape[0])
