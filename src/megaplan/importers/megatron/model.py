"""The `model` section of a launch."""

import re
from math import ceil
from typing import Any, get_args

from megaplan.hosts.megatron.limits import CHUNK_SIZE
from megaplan.hosts.megatron.not_carried import ROTARY as ANGLES
from megaplan.hosts.megatron.rows_model import MODEL, MOE
from megaplan.hosts.megatron.stages import flag_list
from megaplan.hosts.megatron.vocabulary import ARGUMENTS
from megaplan.importers.megatron.arguments import Arguments, typed
from megaplan.importers.megatron.mindspeed import foreign_modules
from megaplan.importers.megatron.stack import LaunchLayers
from megaplan.importers.megatron.tokenizer_files import ends_beyond
from megaplan.importers.megatron.tokenizers import Sizes, patched_words, tokenizer_size
from megaplan.importers.megatron.unset import readable
from megaplan.spec.host_words import LoadBalancing

ROTARY = ("rope", "yarn")
SCALING = ("use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor")
MOE_NAMES = tuple(row.name for row in MOE)
LATENT_NAMES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
INDEXER_NAMES = tuple(row.name for row in MODEL if row.block == "indexer")


def read_model(launch: Arguments, stack: LaunchLayers, tp: int) -> dict[str, Any]:
    """The section as plain values."""
    letters = stack.letters
    model: dict[str, Any] = {
        "pattern": "|".join(stack.stages),
        "num_layers": len(letters),
        **launch.section("model"),
        "vocab_size": _vocabulary(launch, tp),
    }
    hidden = model["hidden_size"]
    _norm_embeddings(launch, hidden, copied=model["tie_embeddings"] and len(stack.stages) > 1)
    bias, position = not launch.given("disable_bias_linear"), _position(launch)
    if position == "learned_absolute" and "A" in letters:
        model["learned_positions"] = launch.whole("max_position_embeddings")
    activation = "swiglu" if launch.given("swiglu") or _quick(launch) else "relu2" if launch.given("squared_relu") else "gelu"
    ffn = launch.optional("ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if launch.given("swiglu") else 4 * hidden)
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
        launch.pass_over(*MOE_NAMES)  # they have no effect then
    if "D" in letters:
        model["mlp"] = {"ffn_hidden_size": ffn, "activation": activation, **_given(bias=bias)}
    if stack.num_modules:
        width = model["moe"]["ffn_hidden_size"] if "D" not in stack.ahead and "moe" in model else ffn
        model["features"] = {"mtp": _module(stack, width, activation, bias=bias)}
    return model


def _norm_embeddings(launch: Arguments, hidden: int, *, copied: bool) -> None:
    """Warns of BLOOM's norm of embeddings, which host megatron lacks; a pipeline's copy of a tied table has one too."""
    where = " on the first stage and on the last" if copied else ""
    launch.pass_over("embed_layernorm")
    if launch.values.get("embed_layernorm"):
        launch.guess("embed_layernorm", f"the norm of the embeddings is not counted: {2 * hidden:,} parameters{where}")


def _module(stack: LaunchLayers, width: int, activation: str, *, bias: bool) -> dict[str, Any]:
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
    """True if the activation has another gate function and saves the same tensors as swiglu."""
    if not launch.given("quick_geglu"):
        return False
    launch.warn("quick_geglu", "the gate has another function; its tensors are counted as swiglu's")
    return True


def _given(**switches: bool) -> dict[str, bool]:
    """Names of the switches that are on."""
    return {name: value for name, value in switches.items() if value}


def _position(launch: Arguments) -> str:
    """Megatron's type of positions; learned ones by default."""
    position = str(launch.value("position_embedding_type")).replace("rotary", "rope")  # the word of forks
    if launch.given("use_rotary_position_embeddings"):  # Megatron's parser replaces every other value by rope
        if position != "rope":
            launch.overruled("position_embedding_type", "--use-rotary-position-embeddings makes it rope")
        return "rope"
    if position == "alibi":
        launch.guess("position_embedding_type", "ALiBi has no parameters; memory of its score biases is not counted")
        return "none"
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
    if size is not None and str(kind).startswith("Null"):
        size += _end_of_documents(launch, size, multiple if pads else 1)
    if size is None:
        size = launch.vocab_size
        if size is not None:
            return size
        if launch.values.get("extra_vocab_size") is not None:
            return _extended(launch)
        tokens = tokenizer_size(kind, model, launch.values.get("vocab_file"), launch.name, _sizes(launch))
        if tokens.size is None:
            launch.unknown_vocabulary(tokens.shown)
            return 1
        size = tokens.size
        if tokens.guess:
            launch.guess("vocab_size", f"{tokens.shown} is not known: {size:,} tokens, {tokens.guess}", "--set model.vocab_size=…")
        else:
            launch.note("vocab_size", f"{size:,} tokens of {tokens.shown}")
    return ceil(size / multiple) * multiple if pads else size


def _sizes(launch: Arguments) -> Sizes:
    """The sizes by which a public model is known."""
    heads = "num_query_groups" if launch.values.get("group_query_attention") else "num_attention_heads"
    base = launch.values.get("rotary_base", ARGUMENTS["rotary_base"].default)
    return Sizes(launch.values.get("hidden_size"), launch.values.get("ffn_hidden_size"), launch.values.get(heads), base)


def _end_of_documents(launch: Arguments, size: int, multiple: int) -> int:
    """Tokens of a NullTokenizer beyond `--vocab-size`: an end of documents, in the Megatron that the launch is part of."""
    beyond = ends_beyond(launch.name)
    if beyond is None and ceil((size + 1) / multiple) > ceil(size / multiple):
        said = f"until April 2026 Megatron's NullTokenizer counts an end of documents beyond --vocab-size {size}"
        launch.note("vocab_size", f"{said}; nothing in the launch shows its release, so a later one is assumed")
    elif beyond:
        launch.note("vocab_size", f"the NullTokenizer of this Megatron counts an end of documents beyond --vocab-size {size}")
    return int(bool(beyond))


def _extended(launch: Arguments) -> int:
    """The vocabulary of Pai-Megatron-Patch: a tokenizer's words and the rows that are added, which Megatron does not pad."""
    launch.pass_over("extra_vocab_size", "patch_tokenizer_type")
    kind, load, extra = (launch.values.get(key) for key in ("patch_tokenizer_type", "load", "extra_vocab_size"))
    words = patched_words(kind, load, launch.name)
    if words is None or isinstance(extra, bool) or not isinstance(extra, int) or extra < 0:
        launch.unknown_vocabulary(f"{readable(str(kind))} with --extra-vocab-size {readable(str(extra))}")
        return 1
    launch.note("extra_vocab_size", f"{words:,} words of {kind} and {extra:,} more rows")
    return words + extra


def _attention(launch: Arguments, stack: LaunchLayers, hidden: int, *, bias: bool, rotates: bool) -> dict[str, Any]:
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
                launch.warn(name, ANGLES)
        launch.pass_over(*SCALING)
        if queried and not bias:
            launch.overruled("add_qkv_bias", "projections into latent attention have no bias")
        return {**found, **_given(output_bias=bias), **({} if normed else {"latent_norm": False}), **_indexer(launch, stack, places)}
    _without_latent(launch)
    groups = launch.whole("num_query_groups")
    if not launch.given("group_query_attention") and groups != heads:
        launch.overruled("num_query_groups", "it is read with --group-query-attention")
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


def _without_latent(launch: Arguments) -> None:
    """Passes over widths of latent attention, unless modules of a fork may build it by themselves."""
    if not foreign_modules(launch.values.get("spec")):
        for name in LATENT_NAMES:
            launch.overruled(name, "it is read with --multi-latent-attention")
            launch.pass_over(name)


def _indexer(launch: Arguments, stack: LaunchLayers, places: list[int]) -> dict[str, Any]:
    """The indexer of sparse attention; layers that share the choice of an earlier one follow from a period and an offset."""
    if launch.word("experimental_attention_variant") != "dsa":
        launch.pass_over(*INDEXER_NAMES)
        return {}
    if stack.hybrid:
        launch.cannot("experimental_attention_variant", "it is read of GPT models")
    if launch.word("dsa_kernel_backend") != "cudnn":
        launch.cannot("dsa_kernel_backend", "the scores of other kernels are not priced", "cudnn")
    if not launch.given("dsa_indexer_use_sparse_loss"):
        launch.cannot("dsa_indexer_use_sparse_loss", "a loss of all keys is not priced", "")
    period, offset = launch.whole("dsa_indexer_topk_freq"), int(launch.number("dsa_indexer_skip_topk_offset") or 0)
    shared = [place for number, place in enumerate(places, start=1) if max(number - max(offset, 1), 0) % period]
    chosen = {"layers": [place for place in places if place not in set(shared)], **({"shared_layers": shared} if shared else {})}
    return {"indexer": {**launch.section("model.attention.indexer"), **chosen}}


def _scaling(launch: Arguments, *, rotates: bool) -> dict[str, Any]:
    """`rope_scaling`: Megatron divides positions by one factor, or scales frequencies as Llama 3.1 does."""
    factor, divisor = launch.number("rope_scaling_factor"), launch.number("rotary_seq_len_interpolation_factor")
    if not rotates:
        launch.pass_over(*SCALING)
        return {}
    if launch.given("use_rope_scaling"):
        if divisor is not None:
            launch.cannot("rotary_seq_len_interpolation_factor", "a spec has one rule of rotary scaling; --use-rope-scaling is taken")
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
        launch.cannot("window_size", "it is read as a pair: this number of positions before a token, and 0 after it", "4095 0")
        return None
    return found[0] + 1


def _full_layers(launch: Arguments, stack: LaunchLayers, places: list[int], *, windowed: bool) -> dict[str, Any]:
    """Attention layers without the window: every n-th, or those with flag 0."""
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
        launch.warn("moe_aux_loss_coeff", "the router balances nothing")
        weight = 0.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        launch.wrong("moe_aux_loss_coeff", weight, "a number from 0 on")
        weight = 0.0
    return kind, float(weight)


def _items(value: Any) -> list[Any]:
    """A list; also one in brackets as Python or YAML writes it."""
    if isinstance(value, str) and value.startswith("["):
        return [typed(item.strip(" '\"")) for item in re.split(r"[,\s]+", value.strip("[] ")) if item]
    return list(value) if isinstance(value, list | tuple) else [value]
