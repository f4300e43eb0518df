"""Remat policies of MaxText: names of tensors that are saved on the device or in host memory, and the sizes of these tensors.

Source: `get_remat_policy` and `minimal_policy` of `src/maxtext/layers/decoders.py`, `get_save_and_offload_names` of
`src/maxtext/utils/maxtext_utils.py` and the calls of `checkpoint_name`, AI-Hypercomputer/maxtext at e591f30c.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from megaplan.families.attention.section import LatentAttention
from megaplan.inventory.tensors import Block
from megaplan.scalars import GATED
from megaplan.spec.host_words import RematTensor
from megaplan.spec.models import Spec

TENSORS: tuple[str, ...] = get_args(RematTensor)
DEVICE, HOST = "device", "offload"
_PROJECTIONS = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
_MLP = ("mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")
_NAMED: dict[str, tuple[str, ...]] = {
    "minimal": (*_PROJECTIONS, "out_proj", *_MLP),
    "minimal_with_context": (*_PROJECTIONS, "out_proj", *_MLP, "context"),
    "save_dot_with_context_except_mlp": (*_PROJECTIONS, "out_proj", "context"),
    "save_dot_except_mlpwi": (*_PROJECTIONS, "out_proj", "mlpwo"),
    "save_dot_except_mlp": (*_PROJECTIONS, "out_proj"),
    "save_qkv_proj": _PROJECTIONS,
    "save_out_proj": ("out_proj",),
}
_OFFLOADED = {"qkv_proj_offloaded": _PROJECTIONS[:4], "minimal_offloaded": (*_PROJECTIONS, "out_proj", *_MLP)}
INPUT = "decoder_layer_input"
LSE_BYTES = 4
EXPERT_NAMES = {"mlpwi_0": "moe_mlpwi_0", "mlpwi_1": "moe_mlpwi_1", "mlpwo": "moe_mlpwo"}
"""Tensors of routed experts also have the names of a dense MLP's tensors: a policy with either name saves them."""


def saved_places(spec: Spec) -> Mapping[str, str]:
    """`device` or `offload` for each tensor that a policy names; empty if the whole block is recomputed."""
    host = spec.host
    if spec.recompute.default != "selective":
        return {}
    if host.remat_policy == "custom":
        return {str(name): str(place) for name, place in host.remat_tensors.items()}
    return dict.fromkeys(_NAMED.get(host.remat_policy, ()), DEVICE) | dict.fromkeys(_OFFLOADED.get(host.remat_policy, ()), HOST)


def tensors_of(spec: Spec, block: Block) -> Iterator[tuple[str, int]]:
    """Name and bytes, for one token of a device, of each tensor of a layer that a policy can save; linear attention has none."""
    model, tp, size = spec.model, spec.mesh.tp, spec.precision.params.of_products.bytes
    residual, letter = model.hidden_size * size // tp, block.family
    rows = {tensor.name: tensor.shape[0] * size // tp for tensor in block.tensors}
    if letter == "A":
        attention = model.attention
        assert attention is not None
        query, heads = rows.get("q_proj.weight", 0), attention.num_heads
        if isinstance(attention, LatentAttention):
            query = heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim) * size // tp
            key, value = query, heads * attention.v_head_dim * size // tp
            latent = (attention.q_lora_rank or 0) * size
            yield from (("query_wa_proj", latent), ("kv_wa_proj", (attention.kv_lora_rank + attention.qk_rope_head_dim) * size))
            yield from (("mla_q", latent), ("mla_kv", attention.kv_lora_rank * size))
            out = value
        else:
            key, out = rows["k_proj.weight"], query
            value = rows.get("v_proj.weight", key)
        yield from (("query_proj", query), ("key_proj", key), ("value_proj", value))
        yield from (("context", out + heads * LSE_BYTES // tp), ("attention_out", out), ("out_proj", residual))
    elif letter == "D" and model.mlp is not None:
        yield from _mlp(rows["up_proj.weight"], model.mlp.activation, residual)
    elif letter == "E" and model.moe is not None:
        moe = model.moe
        for name, each in _mlp(moe.ffn_hidden_size * size // spec.mesh.etp, moe.activation, model.hidden_size * size):
            yield EXPERT_NAMES.get(name, name), each * moe.top_k
        if moe.shared_ffn_hidden_size:
            yield from _mlp(moe.shared_ffn_hidden_size * size // tp, moe.activation, residual)


def _mlp(inner: int, activation: str, residual: int) -> Iterator[tuple[str, int]]:
    yield from (("mlpwi_0", inner), ("mlpwi_1", inner)) if activation in GATED else (("mlpwi", inner),)
    yield "mlpwo", residual


def saved_bytes(spec: Spec, blocks: Iterable[Block], tokens: int) -> dict[str, dict[str, int]]:
    """Bytes that the policy saves of these layers, by place and name, for this number of tokens on a device, without the block's input."""
    places, found = saved_places(spec), {DEVICE: dict[str, int](), HOST: dict[str, int]()}
    for block in blocks:
        for name, each in tensors_of(spec, block):
            plain = next((dense for dense, routed in EXPERT_NAMES.items() if routed == name), name)
            place = places.get(name, places.get(plain))
            if place is not None:
                found[place][name] = found[place].get(name, 0) + each * tokens
    return found
