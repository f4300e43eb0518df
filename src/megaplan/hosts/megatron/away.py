"""Saved tensors that are off the device between forward and backward: selective recompute makes them again, or they are in host memory.

Source: `recompute_modules` and `offload_modules` of `megatron/core/transformer/transformer_config.py`.
"""

from collections.abc import Iterable

from megaplan.hosts.megatron.setting import COMMON, Names, is_latent, recomputed_modules
from megaplan.spec.models import Spec

RECOMPUTED = {
    "core_attn": ("*", {"softmax", "softmax.mask", "softmax.dropped", "lse", "context.reordered", "context.transposed"}),
    "mla_up_proj": ("*", {"q", "k", "v", "q_latent.norm", "kv_latent.norm"}),
    "mlp": ("-", {"fc1.output", "activation.output"}),
    "moe_act": ("E", {"routed.activation.output", "routed.activation.unscaled"}),
}
"""Operators, and the tensors that each module makes again. `moe` recomputes all tensors of its operator: it saves the norm's output."""
OFFLOADED = {
    "attn_norm": ("*", {"norm.input"}),
    "qkv_linear": ("*", {"norm.output"}),
    "core_attn": ("*", {"qkv", "q", "k", "v", "softmax", "softmax.mask", "softmax.dropped", "context.transposed"}),
    "attn_proj": ("*", {"context"}),
    "mlp_norm": ("-E", {"norm.input"}),
    "expert_fc1": ("E", {"routed.fc1.input"}),
    "fused_group_mlp": ("E", {"routed.fc1.input"}),
    "moe_act": ("E", {"routed.fc1.output"}),
}
"""Operators, and the tensors that each module saves; tensors of a million elements or more go to the host."""


def recomputed(spec: Spec, letter: str, names: Iterable[str]) -> Names:
    """The kept tensors that selective recompute makes again in backward."""
    modules, kept = recomputed_modules(spec), frozenset(names)
    found = {name for module in modules & RECOMPUTED.keys() if letter in RECOMPUTED[module][0] for name in RECOMPUTED[module][1]}
    if "layernorm" in modules and (letter == "E" or (letter == "*" and is_latent(spec))):
        found.add("norm.output")  # a norm fused into a linear keeps its output
    if "moe" in modules and letter == "E":
        found |= kept - {*COMMON}
    return kept & found


def offloaded(spec: Spec, letter: str, names: Iterable[str]) -> Names:
    """The kept tensors that are in the host's memory between forward and backward."""
    found = {name for module in spec.host.offload_modules if letter in OFFLOADED[module][0] for name in OFFLOADED[module][1]}
    return frozenset(names) & found
