"""Parameters of E blocks: router, expert banks, shared expert."""

from __future__ import annotations

from megaplan.families.dense.tensors import mlp_matrices
from megaplan.families.moe.section import MixtureOfExperts
from megaplan.inventory.makers import norm, replicated
from megaplan.inventory.tensors import Group, Init, Owner, ParamTensor


def moe_tensors(moe: MixtureOfExperts, hidden_size: int, _variant: None = None) -> tuple[ParamTensor, ...]:
    """Tensors of one E block, its pre-norm included.

    A bank is a stack of E matrices in dim 0: EP shards the stack, ETP the expert width, and Muon treats each expert's matrix alone.
    The router is replicated (R-16): every rank scores its tokens against all experts.
    """
    experts, width = moe.num_experts, moe.ffn_hidden_size
    up_names = ("gate_proj", "up_proj") if moe.activation == "swiglu" else ("up_proj",)
    shared = mlp_matrices(hidden_size, moe.shared_ffn_hidden_size, moe.activation, "shared.") if moe.shared_ffn_hidden_size else ()
    return (
        norm("norm.weight", hidden_size),
        replicated("router.weight", (experts, hidden_size), Group.OTHER),
        *(_bank(f"experts.{name}", (experts, width, hidden_size), Init.NORMAL, 1) for name in up_names),
        _bank("experts.down_proj", (experts, hidden_size, width), Init.NORMAL_OUT, 2),
        *shared,
    )


def parameters_per_expert(moe: MixtureOfExperts, hidden_size: int) -> int:
    """Parameters of one routed expert: two matrices, three with swiglu."""
    return (3 if moe.activation == "swiglu" else 2) * hidden_size * moe.ffn_hidden_size


def _bank(name: str, shape: tuple[int, int, int], init: Init, etp_dim: int) -> ParamTensor:
    return ParamTensor(name, shape, Owner.EXPERT_PARALLEL, Group.MATRIX, init, etp_dim, num_matrices=shape[0])
