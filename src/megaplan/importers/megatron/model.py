"""The `model` section of a launch, and its stages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

from megaplan.errors import MegaplanError
from megaplan.hosts.megatron.pattern import OURS, parse_hybrid
from megaplan.hosts.megatron.stages import NAMES, check_layout, even_sizes, layer_kinds, parse_layout
from megaplan.importers.megatron.read import Arguments, moved
from megaplan.spec.megatron_limits import CHUNK_SIZE

NO_LETTER = {
    "G": "a gated delta net has no letter; the nearest recurrent block is R",
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
    """

    stages: tuple[str, ...]
    latent: bool
    num_modules: int
    hybrid: bool

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
    empty = [index for index, stage in enumerate(stack.stages) if not stage]
    if empty:
        key = "hybrid_layer_pattern" if hybrid else "pipeline_model_parallel_layout"
        launch.cannot(key, f"stage {empty[0]} has no layer, and every slot of a plan has one")
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
    stated, modules = launch.optional("num_layers"), launch.optional("mtp_num_layers")
    if modules is not None and modules != pattern.num_modules:
        launch.cannot("mtp_num_layers", f"the pattern has {pattern.num_modules} prediction modules", pattern.num_modules)
    if stated is not None and stated != len(pattern.main):
        launch.tell("num_layers", f"the pattern has {len(pattern.main)} layers, and Megatron takes those")
    used = set(pattern.main) | set(pattern.module or "")
    for symbol in sorted(used & set(NO_LETTER)):
        launch.cannot(key, f"'{symbol}' at column {str(launch.value(key)).index(symbol) + 1}: {NO_LETTER[symbol]}")
    if pattern.module is not None and pattern.module not in ("*-", "+-"):
        launch.cannot(key, f"module {pattern.module!r}: a spec's prediction module is an A and a D block")
    if not pattern.main:
        launch.cannot(key, "the pattern has no layer")
    plain = used & set("*+")
    latent = (launch.given("multi_latent_attention") and bool(plain)) or "+" in used
    return Stack(tuple("".join(OURS.get(one, "A") for one in stage) for stage in stages), latent, pattern.num_modules, hybrid=True)


def _gpt(launch: Arguments, pp: int) -> Stack:
    layers = launch.whole("num_layers")
    kinds = layer_kinds(launch.value("moe_layer_freq"), layers, launch.value("num_experts") is not None)
    if len(kinds) != layers:
        launch.cannot("moe_layer_freq", f"it names {len(kinds)} layers, and --num-layers is {layers}")
        kinds = "-" * layers
    modules = launch.optional("mtp_num_layers") or 0
    if modules and kinds[-1] == "E":
        launch.cannot("mtp_num_layers", "the module's MLP is one of experts, and a spec's is dense")
    layout = launch.value("pipeline_model_parallel_layout")
    if layout is None:
        sizes = even_sizes(launch.values, layers, pp)
        _whole_sizes(launch, sizes, layers)
    else:
        stages = _listed(layout) if isinstance(layout, list) else parse_layout(str(layout), launch.at("pipeline_model_parallel_layout"))
        check_layout(stages, pp, layers, modules, launch.at("pipeline_model_parallel_layout"))
        if modules and "m" not in stages[-1]:
            launch.cannot("pipeline_model_parallel_layout", "prediction modules stand before the last stage, and a plan's on the last")
        sizes = [stage.count("t") for stage in stages]
    for key in (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    ):
        launch.value(key)
    cuts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    letters = ["A" + OURS[kind] for kind in kinds]
    return Stack(
        tuple("".join(letters[start:stop]) for start, stop in pairwise(cuts)),
        launch.given("multi_latent_attention"),
        modules,
        hybrid=False,
    )


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
    for key in ("normalization", "disable_bias_linear", "transformer_impl", "flextron"):
        launch.accept(key)
    hidden = model["hidden_size"]
    activation = "swiglu" if launch.given("swiglu") else "relu2" if launch.given("squared_relu") else "gelu"
    ffn = launch.optional("ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if activation == "swiglu" else 4 * hidden)
    if "A" in letters or stack.num_modules:
        model["attention"] = _attention(launch, stack, hidden)
    else:
        for key in ("num_attention_heads", "position_embedding_type", "rotary_base"):
            launch.value(key)
    if "M" in letters:
        heads = launch.optional("mamba_num_heads")
        model["mamba"] = {"kind": "mamba2", "num_heads": heads, **launch.section("model.mamba"), "chunk_size": CHUNK_SIZE}
    if "E" in letters:
        model["moe"] = _moe(launch, ffn, activation)
    if "D" in letters:
        model["mlp"] = {"ffn_hidden_size": ffn, "activation": activation}
    if stack.num_modules:
        if activation != "relu2":
            launch.cannot("squared_relu", "the MLP of a spec's prediction module is relu2, and Megatron's has the model's activation")
        model["features"] = {"mtp": {"depth": stack.num_modules, "ffn_hidden_size": ffn}}
    return model


def _vocabulary(launch: Arguments, tp: int) -> int:
    padded, multiple = launch.optional("padded_vocab_size"), launch.whole("make_vocab_size_divisible_by") * tp
    if padded is not None:
        launch.optional("vocab_size")
        return padded
    return ceil(launch.whole("vocab_size") / multiple) * multiple


def _attention(launch: Arguments, stack: Stack, hidden: int) -> dict[str, Any]:
    heads = launch.whole("num_attention_heads")
    position = launch.value("position_embedding_type")
    if position not in ("rope", "none"):
        launch.cannot("position_embedding_type", "positions of a spec are rotary, or none", "rope")
    nope = [index for index, letter in enumerate(stack.letters) if letter == "A"] if position == "none" else []
    kind = "mla" if stack.latent else "gqa"
    found = {"kind": kind, "num_heads": heads, **launch.section("model.attention", kind), "nope_layers": nope}
    if stack.latent:
        for key in ("qk_layernorm", "num_query_groups", "kv_channels", "group_query_attention"):
            launch.value(key)
        return found
    groups = launch.whole("num_query_groups")
    window = launch.value("window_size")
    if window is not None and not (isinstance(window, list) and len(window) == 2 and isinstance(window[0], int) and window[1] == 0):
        launch.cannot("window_size", "it is read as two numbers, of positions before a token and 0 after it", "4095 0")
        window = None
    return {
        **found,
        "num_kv_heads": groups if launch.given("group_query_attention") else heads,
        "head_dim": launch.optional("kv_channels") or hidden // heads,
        "window_size": window[0] + 1 if window is not None else None,
    }


def _moe(launch: Arguments, ffn: int, activation: str) -> dict[str, Any]:
    balance = launch.number("moe_aux_loss_coeff") or 0.0
    kind = launch.value("moe_router_load_balancing_type")
    if balance and kind != "seq_aux_loss":
        launch.tell("moe_aux_loss_coeff", f"of {kind}, and a spec's balance loss is over each sequence (seq_aux_loss)")
        balance = 0.0
    launch.accept("moe_shared_expert_gate")
    return {
        **launch.section("model.moe"),
        "ffn_hidden_size": launch.optional("moe_ffn_hidden_size") or ffn,
        "activation": activation,
        "balance_loss_coefficient": balance,
    }
