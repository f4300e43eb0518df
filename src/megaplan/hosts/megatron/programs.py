"""Attention, MLP, Mamba-2 and gated delta net as Megatron-Core runs them: operations, and the storages that their names represent.

A storage that an operation keeps is Megatron-Core's or Transformer Engine's saved tensor, freed when the backward of its last keeper has
ended. All tensors that an operator saves exist at the peak of its forward. `fetches` lists gradients that have no kept storage of their
size.

Source: the saved tensors of `megatron/core` at d98e8a64 and of Transformer Engine at d0067d0d, and
`mamba_ssm/ops/triton/ssd_combined.py`, by module.
"""

from functools import cache

from megaplan.blocks.ops import Flow, Op
from megaplan.blocks.storages import Shapes
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention
from megaplan.families.linear_attention.section import GatedDeltaNet
from megaplan.families.mamba.section import Mamba2, num_mamba_heads
from megaplan.hosts.megarun.program import Replay
from megaplan.hosts.megatron.setting import (
    GATHERED,
    INPUT_GRADIENT,
    PARTIAL,
    SHARE,
    Names,
    Setting,
    attention_kernel,
    is_latent,
    num_statistics,
    of_bytes,
    operator_replay,
)
from megaplan.hosts.megatron.state import is_single

Sized = tuple[Shapes, Shapes]
"""Storages that an operator saves in addition to `Setting.common`, and temporary ones in addition to `Setting.around`."""
MAMBA_CHUNK = 128
"""Tokens of one chunk of Megatron's scan."""
DELTA_CHUNK = 64
"""Positions that the gated delta rule's kernels compute at once."""
HEADS = ("qkv", "q", "k", "v")


def attention_shapes(at: Setting) -> Sized:
    """Storages of attention."""
    attention, dims, host = at.spec.model.attention, at.dims, at.spec.host
    if attention is None:
        raise ValueError("a pattern with * has no attention")
    heads, gated, kernel = attention.num_heads // dims.tp, False, attention_kernel(at.spec)
    if isinstance(attention, LatentAttention):
        kept, width = _latent_shapes(at, attention), attention.v_head_dim
        columns = heads * (2 * (attention.qk_nope_head_dim + attention.qk_rope_head_dim) + width)
    else:
        kept, width, gated = _grouped_shapes(at, attention), attention.head_dim, attention.gate
        columns = (heads + 2 * max(1, attention.num_kv_heads // dims.tp)) * width
    kept |= at.narrow({"context": dims.wide(heads, width)})
    if dims.cp > 1 and not is_latent(at.spec):
        kept |= at.narrow({"context.reordered": dims.wide(heads, width)})
    if at.copies_inputs and not gated:  # attention itself keeps its output in 16 bits
        kept |= of_bytes({"context.copy": at.input_bytes(at.tokens, heads * width)})
    elif kernel == "flash" and dims.batch > 1:  # cuDNN's output has sequences first, and the projection keeps a copy with positions first
        kept |= at.narrow({"context.transposed": dims.wide(heads, width)})
    scores = {"scores": scores_shape(at), "softmax.gradient": scores_shape(at) if is_single(at.spec) else (0,)}
    if kernel != "unfused":
        kept |= at.wide({"lse": (dims.batch, heads, dims.tokens)})
    else:
        kept |= at.narrow({"softmax": scores["scores"]})
        if host.attention_dropout:
            kept |= {**of_bytes({"softmax.mask": num_scores(at)}), **at.narrow({"softmax.dropped": scores["scores"]})}
    accumulates = kernel != "unfused"  # the kernel accumulates the gradient of the queries in fp32
    copies = {"proj.copies": at.gradient_copies_bytes(at.tokens, dims.hidden), "qkv.copies": at.gradient_copies_bytes(at.tokens, columns)}
    return kept, {**at.narrow(scores), **at.wide({"accumulated": dims.wide(heads, width) if accumulates else (0,)}), **of_bytes(copies)}


def scores_shape(at: Setting) -> tuple[int, ...]:
    """Attention probabilities of one microbatch on a rank."""
    attention, dims = at.spec.model.attention, at.dims
    return dims.batch, (attention.num_heads if attention is not None else 1) // dims.tp, dims.tokens, dims.tokens * dims.cp


def num_scores(at: Setting) -> int:
    """Elements of `scores_shape`."""
    batch, heads, tokens, keys = scores_shape(at)
    return batch * heads * tokens * keys


def _grouped_shapes(at: Setting, attention: GroupedQueryAttention) -> Shapes:
    dims, width = at.dims, attention.head_dim
    heads, groups = attention.num_heads // dims.tp, max(1, attention.num_kv_heads // dims.tp)
    found = at.narrow({"qkv": dims.wide(heads + 2 * groups, width)})
    if groups < heads and attention_kernel(at.spec) == "unfused":
        found |= at.narrow({"kv.expanded": dims.wide(2 * heads, width)})
    if attention.qk_norm:
        found |= at.narrow({"qk.normed": dims.wide(heads + groups, width)})
        found |= at.wide({"qk.stats": dims.wide(heads + groups, num_statistics(at.spec))})
    if attention.gate:
        found |= {**at.narrow({"gate": dims.wide(heads, width)}), **of_bytes({"gated": at.input_bytes(at.tokens, heads * width)})}
    return found


def _latent_shapes(at: Setting, attention: LatentAttention) -> Shapes:
    dims, heads, found = at.dims, attention.num_heads // at.dims.tp, dict[str, tuple[int, ...]]()
    copies: dict[str, int] = {}
    for name, rank in (("q_latent", attention.q_lora_rank), ("kv_latent", attention.kv_lora_rank)):
        if rank is not None:
            found[name] = (at.stream_tokens, rank)
            if attention.latent_norm:
                copies[f"{name}.norm"] = at.input_bytes(at.stream_tokens, rank)
    width = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    found |= {"q": dims.wide(heads, width), "k": dims.wide(heads, width), "v": dims.wide(heads, attention.v_head_dim)}
    return {**at.narrow(found), **of_bytes(copies)}


@cache
def attention_replay(names: Names, away: Names) -> Replay:
    """The replay of attention.

    Unfused attention's softmax in 16 bits writes its gradient in place, and computes the gradient of the values last.
    """

    def present(*wanted: str) -> tuple[str, ...]:
        return tuple(name for name in wanted if name in names)

    heads, projected = present(*HEADS), present(*HEADS, "q_latent.norm", "kv_latent.norm")
    others = present("q_latent", "kv_latent", "qk.normed", "qk.stats", "gate", "kv.expanded")
    made, waits = ("context", *present("context.reordered", "context.transposed", "gated", "context.copy")), (*projected, "norm.input")
    ops = [from_norm("qkv", (*projected, *others))]
    if "softmax" in names:
        last = "softmax.dropped" if "softmax.dropped" in names else "softmax"
        scores = present("softmax", "softmax.mask", "softmax.dropped")
        ops.append(Op("scores", heads, ("scores",), keeps=("context", *projected), grads=heads))
        ops.append(Op("softmax", ("scores",), ("softmax",), keeps=("softmax",), flow=Flow.ADD, fetches=("softmax.gradient",)))
        if last != "softmax":
            ops.append(Op("dropout", ("softmax",), scores[1:], keeps=("softmax.mask",), grads=("softmax",)))
        ops.append(Op("values", heads, made, keeps=(*scores, *projected), grads=(last,), holds=("scores", *scores, *waits)))
    else:
        kept = present("lse", "context", "context.reordered", "context.transposed")
        ops.append(Op("core", heads, (*made, "lse"), keeps=(*kept, *projected), grads=heads, fetches=("accumulated",), holds=waits))
    return operator_replay(names, away, (*ops, projection()), held=frozenset({"norm.output"}))


def projection() -> Op:
    """The product that ends attention.

    An offloaded context has left the device by the end of the forward; a recomputed norm runs before the first gradient.
    """
    return Op("proj", (), (PARTIAL, SHARE), keeps=("norm.output",), grads=("context",), fetches=(GATHERED, "proj.copies"))


def from_norm(name: str, makes: tuple[str, ...]) -> Op:
    """The column-parallel linear that reads the norm's output."""
    return Op(name, ("norm.output",), makes, keeps=("norm.output",), grads=(), fetches=(*INPUT_GRADIENT, f"{name}.copies"))


def mlp_shapes(at: Setting, ffn_hidden_size: int, prefix: str = "", *, gated: bool) -> Sized:
    """Storages of an MLP."""
    width = ffn_hidden_size // at.dims.tp
    columns = width * (2 if gated else 1)
    kept = at.narrow({f"{prefix}fc1.output": at.dims.wide(columns)})
    kept |= of_bytes({f"{prefix}activation.output": at.input_bytes(at.tokens, width)})
    copies = {f"{prefix}fc1.copies": at.gradient_copies_bytes(at.tokens, columns)}
    copies[f"{prefix}fc2.copies"] = at.gradient_copies_bytes(at.tokens, at.dims.hidden)
    return kept, {**at.narrow({f"{prefix}activation.gradient": at.dims.wide(width)}), **of_bytes(copies)}


def mlp_ops(prefix: str = "", makes: tuple[str, ...] = (PARTIAL, SHARE)) -> tuple[Op, ...]:
    """Operations of an MLP, between the norm's output and `makes`."""
    product, output, gradient = (f"{prefix}{name}" for name in ("fc1.output", "activation.output", "activation.gradient"))
    return (
        from_norm(f"{prefix}fc1", (product,)),
        Op(f"{prefix}activation", (product,), (output,), keeps=(product,), fetches=(gradient,)),
        Op(f"{prefix}fc2", (output,), makes, keeps=(output,), grads=(), fetches=(GATHERED, f"{prefix}fc2.copies", gradient)),
    )


def dense_shapes(at: Setting) -> Sized:
    """Storages of a dense MLP."""
    section = at.spec.model.mlp or at.spec.model.features.mtp
    if section is None:
        raise ValueError("a pattern with - has no MLP")
    return mlp_shapes(at, section.ffn_hidden_size, gated=section.activation == "swiglu")


@cache
def dense_replay(names: Names, away: Names) -> Replay:
    """The replay of a dense MLP."""
    return operator_replay(names, away, mlp_ops(), held=away)


def mamba_shapes(at: Setting) -> Sized:
    """Storages of Mamba-2; `products` are C · B of each chunk, and a state and its gradient have a 16-bit copy each."""
    mamba, dims = at.spec.model.mamba, at.dims
    if not isinstance(mamba, Mamba2):
        raise ValueError("a pattern with M has no Mamba-2 dimensions")
    heads = num_mamba_heads(mamba, dims.hidden)
    inner, groups = heads * mamba.head_dim // dims.tp, mamba.num_groups * mamba.state_dim // dims.tp
    columns = (2 * heads * mamba.head_dim + 2 * mamba.num_groups * mamba.state_dim + heads) // dims.tp
    states = -(-at.tokens // MAMBA_CHUNK) * heads * mamba.head_dim * mamba.state_dim // dims.tp
    kept = at.narrow({"zxbcdt": dims.wide(columns), "scan.output": dims.wide(inner), "gated.output": dims.wide(inner)})
    kept |= of_bytes({"gated.norm": at.input_bytes(at.tokens, inner)})
    copied = dict.fromkeys(("states", "states.gradient"), (states,))
    narrowed = (0 if is_single(at.spec) else states,)
    convolved = dict.fromkeys(("conv", "conv.gradient"), dims.wide(inner + 2 * groups))
    held = {
        **at.wide({**copied, "products": dims.wide(MAMBA_CHUNK * max(1, mamba.num_groups // dims.tp))}),
        **at.narrow({**convolved, **{f"{name}.copy": narrowed for name in copied}, "gradient": dims.wide(inner)}),
        **of_bytes({"in_proj.copies": at.gradient_copies_bytes(at.tokens, columns)}),
        **of_bytes({"out_proj.copies": at.gradient_copies_bytes(at.tokens, dims.hidden)}),
    }
    return kept, held


@cache
def mamba_replay(names: Names, away: Names) -> Replay:
    """The replay of Mamba-2; convolution, scan and norm are one call, whose frame references all three outputs."""
    inside = ("conv", "states", "states.copy", "products")
    again = (*inside, "conv.gradient", "states.gradient", "states.gradient.copy")
    ops = (
        from_norm("in_proj", ("zxbcdt",)),
        Op("scan", ("zxbcdt",), ("scan.output", "gated.output", *inside), keeps=("zxbcdt", "scan.output"), fetches=again),
        Op("gate", ("gated.output",), ("gated.norm",), keeps=("gated.output",), fetches=("gradient",), holds=inside),
        Op("out_proj", (), (PARTIAL, SHARE), keeps=("gated.norm",), fetches=(GATHERED, "out_proj.copies", "gradient")),
    )
    return operator_replay(names, away, ops)


def delta_shapes(at: Setting) -> Sized:
    """Storages: inputs of the convolution, of the norms of queries and keys, and of the delta rule's kernel.

    That kernel repeats keys for the heads of the values.

    States between chunks are in 16 bits; each chunk also writes its own update in 16 bits.

    Source: `megatron/core/ssm/gated_delta_net/common.py`, and `ChunkGatedDeltaRuleFunction` of flash-linear-attention.
    """
    delta, dims = at.spec.model.linear_attention, at.dims
    if not isinstance(delta, GatedDeltaNet):
        raise ValueError("a pattern with G has no gated delta net")
    heads, values = delta.num_value_heads // dims.tp, delta.num_value_heads * delta.value_dim // dims.tp
    channels = (2 * delta.num_key_heads * delta.key_dim + delta.num_value_heads * delta.value_dim) // dims.tp
    kept = at.narrow({
        **dict.fromkeys(("conv.input", "conv.output"), dims.wide(channels)),
        "keys.repeated": dims.wide(2 * heads, delta.key_dim),
        **dict.fromkeys(("values", "rule.output", "gate"), dims.wide(values)),
        "rule.inverse": dims.wide(heads, DELTA_CHUNK),
    })  # fmt: skip
    kept |= of_bytes({"decay": (4 + 2) * at.tokens * heads, "gated.norm": at.input_bytes(at.tokens, values)})
    states = -(-at.tokens // DELTA_CHUNK) * heads * delta.key_dim * delta.value_dim
    written = at.tokens * heads * (delta.key_dim + 2 * delta.value_dim)
    held = at.narrow({"states": (states + written,), "states.gradient": (states + written,), "conv": dims.wide(channels)})
    held |= at.narrow({"gradient": dims.wide(values)})
    held |= of_bytes({"in_proj.copies": at.gradient_copies_bytes(at.tokens, channels + values)})
    return kept, held | of_bytes({"out_proj.copies": at.gradient_copies_bytes(at.tokens, dims.hidden)})


@cache
def delta_replay(names: Names, away: Names) -> Replay:
    """The replay of a gated delta net."""
    rule = ("keys.repeated", "values")
    ops = (
        from_norm("in_proj", ("conv.input", "gate")),
        Op("conv", ("conv.input",), ("conv.output",), keeps=("conv.input",), grads=("conv.input", "gate")),
        Op("repeat", ("conv.output",), (*rule, "decay"), keeps=("conv.output",)),
        Op(
            "rule",
            rule,
            ("rule.output", "rule.inverse", "states", "conv"),
            keeps=(*rule, "decay", "rule.output", "rule.inverse"),
            fetches=("states", "states.gradient"),
        ),
        Op("norm heads", ("rule.output",), ("gated.norm",), keeps=("gate",), fetches=("gradient",), holds=("states", "conv")),
        Op("out_proj", (), (PARTIAL, SHARE), keeps=("gated.norm",), fetches=(GATHERED, "out_proj.copies", "gradient")),
    )
    return operator_replay(names, away, ops)
