"""The `model` section of a launch, and its stages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any, get_args

from megaplan.errors import MegaplanError
from megaplan.hosts.megatron.not_carried import ROTARY as ANGLES
from megaplan.hosts.megatron.pattern import OURS, HybridPattern, parse_hybrid
from megaplan.hosts.megatron.rows_model import MOE
from megaplan.hosts.megatron.stages import NAMES, check_layout, even_sizes, flag_list, layer_kinds, parse_layout
from megaplan.importers.megatron.arguments import Arguments, moved, typed
from megaplan.importers.megatron.tokenizers import tokenizer_size
from megaplan.spec.host import LoadBalancing
from megaplan.spec.megatron_limits import CHUNK_SIZE
from megaplan.spec.models import MAX_LAYERS

ROTARY = ("rope", "yarn")
SCALING = ("use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor")
MOE_NAMES = tuple(row.name for row in MOE)

NO_LETTER = {
    "D": "sparse attention has no letter; A with model.attention.indexer is the nearest",
}


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of a launch.

    Attributes:
        stages: Our letters of each virtual stage, in model order; one stage without a pipeline.
        latent: Whether attention is latent.
        num_modules: Prediction modules.
        hybrid: Whether Megatron builds its HybridModel.
        ahead: Letters of a prediction module's blocks.
    """

    stages: tuple[str, ...]
    latent: bool
    num_modules: int
    hybrid: bool
    ahead: str = "AD"

    @property
    def letters(self) -> str:
        """One a layer."""
        return "".join(self.stages)


def read_stack(launch: Arguments, pp: int) -> Stack:
    """The layers and where they are cut; an empty stack if something is wrong."""
    hybrid = launch.value("hybrid_layer_pattern") is not None or launch.value("hybrid_override_pattern") is not None
    try:
        stack = _hybrid(launch, pp) if hybrid else _gpt(launch, pp)
    except MegaplanError as error:
        key = "hybrid_layer_pattern" if hybrid else "pipeline_model_parallel_layout"
        launch.fail([moved(found, launch.at(key)) for found in error.diagnostics])
        return Stack(("A",), latent=False, num_modules=0, hybrid=hybrid)
    return stack


def _hybrid(launch: Arguments, pp: int) -> Stack:
    key = "hybrid_layer_pattern" if launch.value("hybrid_layer_pattern") is not None else "hybrid_override_pattern"
    pattern = parse_hybrid(str(launch.value(key)), launch.at(key))
    for other in (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        if launch.value(other) not in (None, False):
            launch.cannot(other, "a hybrid pattern forbids it; '|' says where virtual stages begin")
    first, last = (launch.optional(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    stages = pattern.stages(pp, first, last, where=launch.at(key))
    pattern = _with_module(launch, pattern)
    stated, modules = launch.optional("num_layers"), launch.optional("mtp_num_layers")
    if modules is not None and modules != pattern.num_modules:
        launch.cannot("mtp_num_layers", f"the pattern has {pattern.num_modules} prediction modules", pattern.num_modules)
    if stated is not None and stated != len(pattern.main):
        launch.tell("num_layers", f"the pattern has {len(pattern.main)} layers, and Megatron takes those")
    used = set(pattern.main) | set(pattern.module or "")
    for symbol in sorted(used & set(NO_LETTER)):
        launch.cannot(key, f"'{symbol}' at column {str(launch.value(key)).index(symbol) + 1}: {NO_LETTER[symbol]}")
    if not pattern.main:
        launch.cannot(key, "the pattern has no layer")
    plain = used & set("*+")
    latent = (launch.given("multi_latent_attention") and bool(plain)) or "+" in used
    return Stack(
        tuple("".join(OURS.get(one, "A") for one in stage) for stage in stages),
        latent,
        pattern.num_modules,
        hybrid=True,
        ahead=_ahead(launch, key, pattern),
    )


def _ahead(launch: Arguments, key: str, pattern: HybridPattern) -> str:
    """Our letters of a prediction module, each of which but D stands for a block of the layers."""
    module = pattern.module if pattern.module is not None else "*-"
    ahead = "".join(OURS.get(one, "A") for one in module)
    beyond = [symbol for symbol in module if OURS.get(symbol, "A") not in ("D", *map(OURS.get, pattern.main))]
    if pattern.module is not None and beyond:
        launch.cannot(key, f"module {module!r}: '{beyond[0]}' is in no layer, whose dimensions a spec's prediction module has")
    if ahead.count("E") > 1:
        launch.cannot(key, f"module {module!r}: a spec's prediction module has one E at most")
    return ahead


def _with_module(launch: Arguments, pattern: HybridPattern) -> HybridPattern:
    """With the prediction module that an argument of its own gives."""
    module, count = launch.value("mtp_hybrid_override_pattern"), launch.optional("mtp_num_layers")
    return pattern._replace(module=str(module), num_modules=count) if module and count and pattern.module is None else pattern


def _gpt(launch: Arguments, pp: int) -> Stack:
    layers = launch.whole("num_layers", most=MAX_LAYERS // 2)
    frequency = launch.value("moe_layer_freq")
    if re.fullmatch(r"-?\d+", str(frequency)) and not 0 < int(str(frequency)[:20]) <= MAX_LAYERS:
        launch.wrong("moe_layer_freq", frequency, f"a period from 1 to {MAX_LAYERS:,}, or a list of 0 and 1")
        frequency = 1
    kinds = layer_kinds(frequency, layers, launch.value("num_experts") is not None)
    if len(kinds) != layers:
        launch.cannot("moe_layer_freq", f"it names {len(kinds)} layers, and --num-layers is {layers}")
        kinds = "-" * layers
    modules = launch.optional("mtp_num_layers") or 0
    layout = launch.value("pipeline_model_parallel_layout")
    if layout is None:
        ends = {key: launch.given(key) for key in _COUNTED_ENDS}
        sizes = even_sizes({**ends, **{key: _spread(launch, key) for key in _SPREAD}}, layers, pp)
        _whole_sizes(launch, sizes, layers)
    else:
        stages = _listed(layout) if isinstance(layout, list) else parse_layout(str(layout), launch.at("pipeline_model_parallel_layout"))
        check_layout(stages, pp, layers, modules, launch.at("pipeline_model_parallel_layout"))
        if modules and "m" not in stages[-1]:
            launch.cannot("pipeline_model_parallel_layout", "prediction modules stand before the last stage, and a plan's on the last")
        sizes = [stage.count("t") for stage in stages]
    for key in (*_SPREAD, *_COUNTED_ENDS):
        launch.value(key)
    cuts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    letters = [mixer + OURS[kind] for mixer, kind in zip(_mixers(launch, layers), kinds, strict=True)]
    return Stack(
        tuple("".join(letters[start:stop]) for start, stop in pairwise(cuts)),
        launch.given("multi_latent_attention"),
        modules,
        hybrid=False,
        ahead=f"A{OURS[kinds[-1]]}",
    )


_COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_SPREAD = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)


def _spread(launch: Arguments, key: str) -> int | None:
    """A number of layers or stages; None where it is absent or 0."""
    return launch.whole(key, most=MAX_LAYERS) if launch.value(key) else None


def _mixers(launch: Arguments, layers: int) -> str:
    """One letter a layer of a GPT model: attention, or a gated delta net where it is the variant and the layer is not every n-th."""
    variant, frequency = launch.word("experimental_attention_variant"), launch.value("linear_attention_freq")
    if variant is None:
        return "A" * layers
    if isinstance(frequency, int) and frequency > 0:
        return "".join("A" if index % frequency == 0 else "G" for index in range(1, layers + 1))
    flags = flag_list(frequency or [])
    if len(flags) != layers:
        launch.cannot("linear_attention_freq", f"it names {len(flags)} layers, and --num-layers is {layers}")
        return "A" * layers
    return "".join("G" if flag == "1" else "A" for flag in flags)


def _whole_sizes(launch: Arguments, sizes: list[int], layers: int) -> None:
    if sum(sizes) != layers:
        launch.cannot("num_layers", f"{layers} layers do not divide over {len(sizes)} virtual stages")


def _listed(layout: list[Any]) -> tuple[str, ...]:
    return tuple("".join(NAMES.get(str(token), "?") for token in (stage if isinstance(stage, list) else [stage])) for stage in layout)


def read_model(launch: Arguments, stack: Stack, tp: int) -> dict[str, Any]:
    """The section as plain values."""
    letters = stack.letters
    model: dict[str, Any] = {
        "pattern": "|".join(stack.stages),
        "num_layers": len(letters),
        **launch.section("model"),
        "vocab_size": _vocabulary(launch, tp),
    }
    hidden = model["hidden_size"]
    bias, position = not launch.given("disable_bias_linear"), _position(launch)
    if position == "learned_absolute" and "A" in letters:
        model["learned_positions"] = launch.whole("max_position_embeddings")
    activation = "swiglu" if launch.given("swiglu") or _quick(launch) else "relu2" if launch.given("squared_relu") else "gelu"
    ffn = launch.optional("ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if activation == "swiglu" else 4 * hidden)
    if "A" in letters or (stack.num_modules and "A" in stack.ahead):
        model["attention"] = _attention(launch, stack, hidden, bias=bias, rotates=position in ROTARY)
    else:
        launch.pass_over(
            "num_attention_heads", "rotary_base", "rotary_percent", "qk_layernorm", "add_qkv_bias", "num_query_groups", "kv_channels"
        )
        launch.pass_over("group_query_attention", "window_size", "window_attn_skip_freq", *SCALING)
    if "M" in letters:
        heads = launch.optional("mamba_num_heads")
        model["mamba"] = {"kind": "mamba2", "num_heads": heads, **launch.section("model.mamba"), "chunk_size": CHUNK_SIZE}
    if "G" in letters:
        model["linear_attention"] = {"kind": "gated_delta", **launch.section("model.linear_attention")}
    if "E" in letters:
        model["moe"] = _moe(launch, ffn, activation, bias=bias)
    elif launch.value("num_experts") is None:
        launch.pass_over(*MOE_NAMES)  # they say nothing then
    if "D" in letters:
        model["mlp"] = {"ffn_hidden_size": ffn, "activation": activation, **_given(bias=bias)}
    if stack.num_modules:
        width = model["moe"]["ffn_hidden_size"] if "D" not in stack.ahead and "moe" in model else ffn
        model["features"] = {"mtp": _module(stack, width, activation, bias=bias)}
    return model


def _module(stack: Stack, width: int, activation: str, *, bias: bool) -> dict[str, Any]:
    """The section of prediction modules."""
    plain = stack.ahead in ("AD", "AE")
    return {
        "depth": stack.num_modules,
        "normed_input": True,
        "ffn_hidden_size": width,
        "activation": activation,
        **_given(bias=bias and "D" in stack.ahead, experts=plain and "E" in stack.ahead),
        **({} if plain else {"pattern": stack.ahead}),
    }


def _quick(launch: Arguments) -> bool:
    """Whether the activation is a gated one by another function, which keeps what swiglu keeps."""
    if not launch.given("quick_geglu"):
        return False
    launch.tell("quick_geglu", "the gate's function is another; its tensors are those of swiglu")
    return True


def _given(**switches: bool) -> dict[str, bool]:
    """Switches that are on."""
    return {name: value for name, value in switches.items() if value}


def _position(launch: Arguments) -> str:
    """Megatron's type of positions; learned ones where the launch says nothing."""
    if launch.given("use_rotary_position_embeddings"):
        return "rope"
    position = str(launch.value("position_embedding_type"))
    if position not in (*ROTARY, "learned_absolute", "none"):
        launch.cannot("position_embedding_type", "positions of a spec are learned, rotary, or none", "rope")
    return position


def _vocabulary(launch: Arguments, tp: int) -> int:
    padded, multiple = launch.optional("padded_vocab_size"), launch.whole("make_vocab_size_divisible_by") * tp
    launch.pass_over("tokenizer_type", "tokenizer_model")
    kind, model = (launch.values.get(key) for key in ("tokenizer_type", "tokenizer_model"))
    pads = not launch.given("no_pad_vocab_size")
    if padded is not None:
        launch.optional("vocab_size")
        return padded
    size = launch.optional("vocab_size")
    if size is None:
        size = launch.vocab_size
        if size is not None:
            return size
        size, source = tokenizer_size(kind, model)
        if size is None:
            launch.unknown_vocabulary(str(source))
            return 1
        launch.note("vocab_size", f"{size:,} tokens of {source}")
    return ceil(size / multiple) * multiple if pads else size


def _attention(launch: Arguments, stack: Stack, hidden: int, *, bias: bool, rotates: bool) -> dict[str, Any]:
    heads = launch.whole("num_attention_heads")
    places = [index for index, letter in enumerate(stack.letters) if letter == "A"]
    nope = [] if rotates else places
    kind = "mla" if stack.latent else "gqa"
    normed, queried = launch.given("qk_layernorm"), launch.given("add_qkv_bias")
    found = {"kind": kind, "num_heads": heads, **launch.section("model.attention", kind), "nope_layers": nope}
    if stack.latent:
        launch.pass_over("num_query_groups", "kv_channels", "group_query_attention", "rotary_percent")
        for name in SCALING:
            if launch.values.get(name):
                launch.tell(name, ANGLES)
        launch.pass_over(*SCALING)
        if queried and not bias:
            launch.cannot("add_qkv_bias", "projections of a spec's latent attention have no bias", "")
        return {**found, **_given(output_bias=bias), **({} if normed else {"latent_norm": False})}
    groups = launch.whole("num_query_groups")
    head_dim = launch.optional("kv_channels") or hidden // heads
    share = launch.number("rotary_percent") or 1.0
    if share > 1:
        launch.wrong("rotary_percent", share, "a share of a head, at most 1")
        share = 1.0
    rotated = int(head_dim * share)
    window = _window(launch)
    return {
        **found,
        **_given(sinks=launch.word("softmax_type") == "learnable", gate=launch.given("attention_output_gate")),
        "num_kv_heads": groups if launch.given("group_query_attention") else heads,
        "head_dim": head_dim,
        "qk_norm": normed,
        "bias": bias or queried,
        **_given(output_bias=bias),
        **({"rotary_dim": rotated} if rotates and rotated != head_dim else {}),
        **_scaling(launch, rotates=rotates),
        "window_size": window,
        **_full_layers(launch, stack, places, windowed=window is not None),
    }


def _scaling(launch: Arguments, *, rotates: bool) -> dict[str, Any]:
    """`rope_scaling`: Megatron divides positions by one factor, or scales frequencies as Llama 3.1 does."""
    factor, divisor = launch.number("rope_scaling_factor"), launch.number("rotary_seq_len_interpolation_factor")
    if not rotates:
        launch.pass_over(*SCALING)
        return {}
    if launch.given("use_rope_scaling"):
        if divisor is not None:
            launch.cannot("rotary_seq_len_interpolation_factor", "a spec scales rotary frequencies by one rule, here --use-rope-scaling's")
        return {"rope_scaling": {"kind": "llama3", "factor": factor}}
    return {} if divisor is None else {"rope_scaling": {"kind": "linear", "factor": divisor}}


def _window(launch: Arguments) -> int | None:
    """Positions that a token sees, itself included."""
    found = launch.value("window_size")
    if isinstance(found, str):  # (4095, 0), as Python writes it
        found = [int(number) for number in re.findall(r"-?\d+", found)]
    if found is None or (isinstance(found, list | tuple) and list(found) == [-1, -1]):
        return None
    if not (isinstance(found, list | tuple) and len(found) == 2 and isinstance(found[0], int) and found[1] == 0):
        launch.cannot("window_size", "it is read as two numbers, of positions before a token and 0 after it", "4095 0")
        return None
    return found[0] + 1


def _full_layers(launch: Arguments, stack: Stack, places: list[int], *, windowed: bool) -> dict[str, Any]:
    """Attention layers without the window: every n-th, or those whose flag is 0."""
    frequency = launch.value("window_attn_skip_freq")
    if frequency is None or not windowed:
        return {}
    if stack.hybrid:
        launch.cannot("window_attn_skip_freq", "layers of a hybrid pattern are counted otherwise")
        return {}
    if isinstance(frequency, int) and frequency > 0:
        return {"full_layers": [place for index, place in enumerate(places, start=1) if index % frequency == 0]}
    flags = flag_list(frequency)
    if len(flags) != len(places):
        launch.cannot("window_attn_skip_freq", f"it names {len(flags)} layers, and the model has {len(places)}")
    return {"full_layers": [place for place, flag in zip(places, flags, strict=False) if flag == "0"]}


def _moe(launch: Arguments, ffn: int, activation: str, *, bias: bool) -> dict[str, Any]:
    _, coefficient = load_balancing(launch)
    return {
        **launch.section("model.moe"),
        "ffn_hidden_size": launch.optional("moe_ffn_hidden_size") or ffn,
        "activation": activation,
        **_given(bias=bias, shared_gate=launch.given("moe_shared_expert_gate")),
        "balance_loss_coefficient": coefficient,
    }


def load_balancing(launch: Arguments) -> tuple[str, float]:
    """The router's balancing and its coefficient."""
    kinds, weights = (_items(launch.value(key)) for key in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"))
    found = [(str(kind), weight) for kind, weight in zip(kinds, weights * len(kinds) if len(weights) == 1 else weights, strict=False)]
    used = [pair for pair in found if pair[1]] or found[:1] or [("aux_loss", 0.0)]
    kind, weight = used[0]
    if len(used) > 1:
        launch.cannot("moe_router_load_balancing_type", "a spec has one balancing of the router", kind)
    if kind not in get_args(LoadBalancing):
        launch.cannot("moe_router_load_balancing_type", f"it is read as one of {', '.join(get_args(LoadBalancing))}", "aux_loss")
        kind = "aux_loss"
    if kind == "none" and weight:
        launch.tell("moe_aux_loss_coeff", "the router balances nothing")
        weight = 0.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        launch.wrong("moe_aux_loss_coeff", weight, "a number from 0 on")
        weight = 0.0
    return kind, float(weight)


def _items(value: Any) -> list[Any]:
    """A list, also one in brackets as Python or YAML writes it."""
    if isinstance(value, str) and value.startswith("["):
        return [typed(item.strip(" '\"")) for item in re.split(r"[,\s]+", value.strip("[] ")) if item]
    return list(value) if isinstance(value, list | tuple) else [value]
