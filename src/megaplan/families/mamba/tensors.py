"""Parameters of M blocks: Mamba-1, Mamba-2 and Mamba-3.

Under TP (R-17) the input projection, convolution, per-head tensors, gated norm and output projection shard by heads and groups; each part
of a fused projection shards on its own, so that a rank's z, x, B, C and dt belong to the same heads. Muon updates only the output
projection; AdamW updates the rest, the input projection included (R-60). Mamba-1 shards by channels.
"""

from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3, num_mamba_heads
from megaplan.inventory.makers import column, norm, per_head, replicated, row
from megaplan.inventory.tensors import Group, Init, Owner, ParamTensor


def mamba_tensors(mamba: Mamba1 | Mamba2 | Mamba3, hidden_size: int, _variant: None = None) -> tuple[ParamTensor, ...]:
    """Tensors of one M block, its pre-norm included."""
    if isinstance(mamba, Mamba1):
        return (norm("norm.weight", hidden_size), *_mamba1(mamba, hidden_size))
    heads = num_mamba_heads(mamba, hidden_size)
    body = _mamba2(mamba, hidden_size, heads) if isinstance(mamba, Mamba2) else _mamba3(mamba, hidden_size, heads)
    return (norm("norm.weight", hidden_size), *body)


def _mamba1(mamba: Mamba1, hidden_size: int) -> tuple[ParamTensor, ...]:
    """Mamba-1 (arXiv:2312.00752, section 3.6): in_proj rows x | z; x_proj rows step latent | B | C, which serve all channels."""
    inner, rank, state = mamba.expand * hidden_size, mamba.step_width(hidden_size), mamba.state_dim
    bias = (per_head("conv1d.bias", (inner,), Init.ZEROS),) if mamba.conv_bias else ()
    norms = {"dt_norm": rank, "B_norm": state, "C_norm": state} if mamba.inner_norm == "scaled" else {}
    return (
        column("in_proj.weight", 2 * inner, hidden_size, group=Group.OTHER, parts=(inner, inner)),
        per_head("conv1d.weight", (inner, mamba.conv_kernel), Init.CONV),
        *bias,
        ParamTensor("x_proj.weight", (rank + 2 * state, inner), Owner.TENSOR_PARALLEL, Group.OTHER, Init.NORMAL, 1),
        column("dt_proj.weight", inner, rank, group=Group.OTHER),
        per_head("dt_bias", (inner,), Init.DT_BIAS),
        per_head("A_log", (inner, state), Init.A_LOG),
        per_head("D", (inner,), Init.ONES),
        *(norm(f"{name}.weight", width) for name, width in norms.items()),
        row("out_proj.weight", hidden_size, inner),
        *(_biases((inner, inner), hidden_size) if mamba.bias else ()),
    )


def _mamba2(mamba: Mamba2, hidden_size: int, heads: int) -> tuple[ParamTensor, ...]:
    """Mamba-2 (arXiv:2405.21060, section 7): in_proj rows z | x | B | C | dt, convolution over x | B | C."""
    inner, groups = heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
    projected, convolved = (inner, inner, groups, groups, heads), (inner, groups, groups)
    bias = (per_head("conv1d.bias", (sum(convolved),), Init.ZEROS, convolved),) if mamba.conv_bias else ()
    return (
        column("in_proj.weight", sum(projected), hidden_size, group=Group.OTHER, parts=projected),
        per_head("conv1d.weight", (sum(convolved), mamba.conv_kernel), Init.CONV, convolved),
        *bias,
        per_head("dt_bias", (heads,), Init.DT_BIAS),
        per_head("A_log", (heads,), Init.A_LOG),
        per_head("D", (heads,), Init.ONES),
        *((per_head("gated_norm.weight", (inner,), Init.ONES),) if mamba.gated_norm else ()),
        row("out_proj.weight", hidden_size, inner),
        *(_biases(projected, hidden_size) if mamba.bias else ()),
    )


def _biases(projected: tuple[int, ...], hidden_size: int) -> tuple[ParamTensor, ...]:
    return (
        per_head("in_proj.bias", (sum(projected),), Init.ZEROS, projected),
        replicated("out_proj.bias", (hidden_size,), Group.OTHER, Init.ZEROS),
    )


def _mamba3(mamba: Mamba3, hidden_size: int, heads: int) -> tuple[ParamTensor, ...]:
    """Mamba-3 (arXiv:2603.15569, section 3): in_proj rows z | x | B | C | dt | A | trapezoid gate; no convolution, no gated norm.

    B and C hold one slice of groups · state rows per MIMO rank, each sharded by groups. Rank 1 is the single-input form and has no MIMO
    projections. The angle projection and the B and C norms are shared by all heads and stay replicated on purpose (R-17).
    """
    inner, groups, rank = heads * mamba.head_dim, mamba.num_groups * mamba.state_dim, mamba.mimo_rank
    projected = (inner, inner, *(groups,) * (2 * rank), heads, heads, heads)
    angles = (replicated("angle_proj.weight", (mamba.num_angles, hidden_size), Group.OTHER),) if mamba.num_angles else ()
    fills = {"mimo_x": Init.RANK_MEAN, "mimo_z": Init.ONES, "mimo_o": Init.RANK_MEAN} if rank > 1 else {}
    return (
        column("in_proj.weight", sum(projected), hidden_size, group=Group.OTHER, parts=projected),
        *angles,
        *(per_head(name, (heads, rank, mamba.state_dim), Init.ONES) for name in ("B_bias", "C_bias")),
        *(per_head(name, (heads, rank, mamba.head_dim), fill) for name, fill in fills.items()),
        per_head("D", (heads,), Init.ONES),
        per_head("dt_bias", (heads,), Init.DT_BIAS),
        norm("B_norm.weight", mamba.state_dim),
        norm("C_norm.weight", mamba.state_dim),
        row("out_proj.weight", hidden_size, inner),
    )
