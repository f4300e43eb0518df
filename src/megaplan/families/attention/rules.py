"""Rules of `model.attention`: heads, widths, and layers that are given by index."""

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.attention.scaling import Llama3Scaling, YarnScaling
from megaplan.families.attention.section import GroupedQueryAttention, Indexer, LatentAttention
from megaplan.families.checks import CheckedSpec, divisors, remainder, rising, use_one_of
from megaplan.wording import series


def attention_rules(checked: CheckedSpec, attention: GroupedQueryAttention | LatentAttention) -> Iterator[Diagnostic]:
    """Yields MP332, MP701, MP706 … MP708, MP712, MP713 and MP715."""
    yield from _heads(checked, attention)
    yield from _scaling(checked, attention)
    yield from _layers(checked, attention)


def _heads(checked: CheckedSpec, attention: GroupedQueryAttention | LatentAttention) -> Iterator[Diagnostic]:
    yield from _gates(checked, attention)
    if isinstance(attention, GroupedQueryAttention):
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        if heads % kv_heads:
            detail = remainder("attention.num_heads", heads, "attention.num_kv_heads", kv_heads)
            yield checked.error("MP701", detail, "model.attention.num_kv_heads", use_one_of(divisors(heads)))
        # attention of multi-token prediction always rotates, even if the layers do not
        rotates = checked.attends_ahead or checked.letters is None or checked.count("A") > len(attention.nope_layers)
        if attention.rotary_dim is None and attention.head_dim % 2 and rotates:
            yield _odd(checked, "head_dim", attention.head_dim)
        yield from _options(checked, attention)
    if isinstance(attention, LatentAttention):
        for own in (attention, *(attention.with_heads(place) for place in range(len(attention.layer_latents)))):
            if own.qk_rope_head_dim % 2:
                yield _odd(checked, "qk_rope_head_dim", own.qk_rope_head_dim)
        if attention.indexer is not None and attention.q_lora_rank is None:
            detail = "attention.q_lora_rank = null, and attention.indexer is given"
            yield checked.error("MP707", detail, "model.attention.indexer", "give attention.q_lora_rank, or remove attention.indexer")
        if attention.indexer is not None and attention.indexer.head_dim < attention.qk_rope_head_dim:
            width, rotated = attention.indexer.head_dim, attention.qk_rope_head_dim
            detail = f"attention.indexer.head_dim = {width}, attention.qk_rope_head_dim = {rotated}, and {width} < {rotated}"
            yield checked.error("MP712", detail, "model.attention.indexer.head_dim", f"head_dim: {rotated}")


def _gates(checked: CheckedSpec, attention: GroupedQueryAttention | LatentAttention) -> Iterator[Diagnostic]:
    """Checks that a gate's options have a gate, and that a gate from the query latent has a query latent."""
    biased = isinstance(attention, GroupedQueryAttention) and attention.gate_bias
    for name, value in {"gate_width": "head" * (attention.gate_width == "head"), "gate_bias": "true" * biased}.items():
        if value and not attention.gate:
            yield checked.error("MP715", f"attention.{name} = {value}, attention.gate = false", f"model.attention.{name}", "gate: true")
    if isinstance(attention, LatentAttention) and attention.gate_source == "query":
        needed = {"gate: true": attention.gate, "gate_width: channel": attention.gate_width == "channel"}
        needed["q_lora_rank"] = attention.q_lora_rank is not None
        if not all(needed.values()):
            missing = next(name for name, holds in needed.items() if not holds)
            detail = f"attention.gate_source = query, and not attention.{missing}: one product of the query latent makes queries and gate"
            yield checked.error("MP715", detail, "model.attention.gate_source", f"give attention.{missing}")


def _options(checked: CheckedSpec, attention: GroupedQueryAttention) -> Iterator[Diagnostic]:
    yield from _rotated(checked, attention)
    yield from _layer_heads(checked, attention)
    yield from _values(checked, attention)
    yield from _shared_keys(checked, attention)
    yield from _compressors(checked, attention)
    if attention.qk_norm_width != "head" and not attention.qk_norm:
        detail = f"attention.qk_norm_width = {attention.qk_norm_width}, attention.qk_norm = false"
        yield checked.error("MP715", detail, "model.attention.qk_norm_width", "qk_norm: true")
    if not attention.qk_norm_scale and (not attention.qk_norm or attention.qk_norm_width != "head"):
        detail = f"attention.qk_norm_scale = false, qk_norm = {str(attention.qk_norm).lower()}, qk_norm_width = {attention.qk_norm_width}"
        yield checked.error("MP715", detail, "model.attention.qk_norm_scale", "qk_norm: true, and qk_norm_width: head")


def _rotated(checked: CheckedSpec, attention: GroupedQueryAttention) -> Iterator[Diagnostic]:
    """Checks that rotated widths are even and no wider than the widest head."""
    widest, by_window = max([attention.head_dim, *(own.head_dim or 0 for own in attention.layer_heads)]), attention.window_rotary_dim
    if by_window is not None and attention.window_rope_theta is None:
        detail = (
            f"attention.window_rotary_dim = {by_window}, attention.window_rope_theta = null: layers with a window have no separate angles"
        )
        yield checked.error("MP715", detail, "model.attention.window_rotary_dim", "give attention.window_rope_theta")
    for name, rotated in (("rotary_dim", attention.rotary_dim), ("window_rotary_dim", by_window)):
        if rotated is not None and rotated > widest:
            detail = f"attention.{name} = {rotated}, attention.head_dim = {widest}, and {rotated} > {widest}"
            yield checked.error("MP715", detail, f"model.attention.{name}", f"use an even number up to {widest}")
        elif rotated is not None and rotated % 2:
            yield _odd(checked, name, rotated)


def _layer_heads(checked: CheckedSpec, attention: GroupedQueryAttention) -> Iterator[Diagnostic]:
    """Checks heads of single layers: a whole number of heads per group, rotation at most a head's width, each layer once."""
    key, seen = "model.attention.layer_heads", set[int]()
    for place, given in enumerate(attention.layer_heads):
        own = attention.with_heads(place)
        if own.num_heads % own.num_kv_heads:
            detail = remainder(f"attention.layer_heads[{place}].num_heads", own.num_heads, "num_kv_heads", own.num_kv_heads)
            yield checked.error("MP701", detail, key, use_one_of(divisors(own.num_heads)))
        yield from rising(checked, key, given.layers)
        if checked.letters is not None:
            yield from _not_attention(checked, key, given.layers, checked.letters)
        if both := sorted(seen & set(given.layers)):
            yield checked.error("MP715", f"layer {both[0]} is twice in attention.layer_heads", key, f"remove {both[0]} from one of them")
        seen |= set(given.layers)
    attends = [layer for layer, letter in enumerate(checked.letters or "") if letter == "A"] if seen else ()
    for layer in attends:
        own = attention.with_heads(attention.heads_of(layer))
        turned = own.rotated(attention.window(layer))
        if layer not in attention.nope_layers and turned > own.head_dim:
            detail = f"layer {layer} rotates {turned} dims of a head, but its head_dim is {own.head_dim}"
            hint = "give attention.rotary_dim, or attention.window_rotary_dim with window_rope_theta"
            yield checked.error("MP715", detail, key, hint)
            return


def _shared_keys(checked: CheckedSpec, attention: GroupedQueryAttention) -> Iterator[Diagnostic]:
    """Checks that readers of keys are after their source, each once, with its heads and its window."""
    key, seen, lent = "model.attention.shared_keys", set[int](), {shared.source for shared in attention.shared_keys}
    for shared in attention.shared_keys:
        yield from rising(checked, key, shared.layers)
        if checked.letters is not None:
            yield from _not_attention(checked, key, (shared.source, *shared.layers), checked.letters)
        source = attention.with_heads(attention.heads_of(shared.source))
        for layer in shared.layers:
            own = attention.with_heads(attention.heads_of(layer))
            equal = (own.num_kv_heads, own.head_dim, own.value_width) == (source.num_kv_heads, source.head_dim, source.value_width)
            faults = {
                f"is not after layer {shared.source}": layer <= shared.source,
                "is there twice": layer in seen or layer in lent,
                f"has other key heads or another window than layer {shared.source}": not equal
                or attention.window(layer) != attention.window(shared.source),
            }
            for fault in [fault for fault, holds in faults.items() if holds][:1]:
                yield checked.error("MP715", f"attention.shared_keys: layer {layer} {fault}", key, f"remove {layer}")
        seen |= set(shared.layers)
    if attention.shared_keys and (attention.key_bias or attention.qk_norm_width != "head"):
        detail = "attention.shared_keys is given, with key_bias or qk_norm_width = all_heads, which belong to keys of the layer"
        yield checked.error("MP715", detail, key, "key_bias: false, and qk_norm_width: head")


def _compressors(checked: CheckedSpec, attention: GroupedQueryAttention) -> Iterator[Diagnostic]:
    """Checks latent queries, groups of outputs, and compressed keys: each layer once, an indexer with its sizes."""
    key, seen, made = "model.attention.compressors", set[int](), attention.num_heads * attention.value_width
    for own in attention.compressors:
        yield from rising(checked, key, own.layers)
        if checked.letters is not None:
            yield from _not_attention(checked, key, own.layers, checked.letters)
        if both := sorted(seen & set(own.layers)):
            yield checked.error("MP715", f"layer {both[0]} is twice in attention.compressors", key, f"remove {both[0]} from one of them")
        sizes = own.index_heads and own.index_dim and attention.query_rank
        if own.top_k is not None and not sizes:
            detail = f"attention.compressors: top_k = {own.top_k}, and an indexer needs index_heads, index_dim and query_rank"
            yield checked.error("MP715", detail, key, "top_k: null")
        seen |= set(own.layers)
    groups, rank = attention.output_groups, attention.output_rank
    if bool(groups) != bool(rank) or (groups and made % groups):
        detail = f"attention.output_groups = {groups}, output_rank = {rank}, and the heads' outputs are {made} wide"
        yield checked.error("MP715", detail, "model.attention.output_groups", "output_groups: 0, and output_rank: 0")
    others = {"value_norm": attention.value_norm, "values_from_keys": attention.values_from_keys}
    others |= {"value_head_dim": attention.value_width != attention.head_dim}
    for name in (name for name, given in others.items() if given and attention.values_are_keys):
        detail = f"attention.values_are_keys = true, and {name} is given: values are the keys themselves"
        yield checked.error("MP715", detail, "model.attention.values_are_keys", f"remove {name}")
    if not attention.query_norm_scale and not (attention.qk_norm and attention.qk_norm_scale and attention.qk_norm_width == "head"):
        detail = "attention.query_norm_scale = false, and norms over key heads with a scale are not given"
        yield checked.error("MP715", detail, "model.attention.query_norm_scale", "qk_norm: true, and qk_norm_width: head")


def _values(checked: CheckedSpec, attention: GroupedQueryAttention) -> Iterator[Diagnostic]:
    """Checks that values that come from keys have the keys' width and separate norms."""
    for own in (attention, *(attention.with_heads(place) for place in range(len(attention.layer_heads)))):
        needed = {"value_norm": own.value_norm, "qk_norm": own.qk_norm, "qk_norm_width = head": own.qk_norm_width == "head"}
        needed["value_head_dim as head_dim"] = own.value_width == own.head_dim
        if own.values_from_keys and not all(needed.values()):
            missing = next(name for name, holds in needed.items() if not holds)
            detail = f"attention.values_from_keys = true, and not {missing}: values are the keys before their norm"
            yield checked.error("MP715", detail, "model.attention.values_from_keys", f"give attention.{missing}")
            return


def _scaling(checked: CheckedSpec, attention: GroupedQueryAttention | LatentAttention) -> Iterator[Diagnostic]:
    """Checks rotary scaling: unchanged frequencies must be at least as high as divided ones.

    Equal ends are a ramp of one step, as in Kimi-K2 (yarn) and Llama-4-Scout (llama3). YaRN finds both by the logarithm of the base.
    """
    scaling = attention.rope_scaling
    ends: dict[str, float] = {}
    if isinstance(scaling, Llama3Scaling):
        ends = {"high_freq_factor": scaling.high_freq_factor, "low_freq_factor": scaling.low_freq_factor}
    elif isinstance(scaling, YarnScaling):
        ends = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if attention.rope_theta <= 1:
            detail = f"attention.rope_theta = {attention.rope_theta:g}, attention.rope_scaling.kind = yarn, and yarn needs a base above 1"
            yield checked.error("MP715", detail, "model.attention.rope_theta", "rope_theta: 10000")
    if not ends:
        return
    (fast, above), (slow, below) = ends.items()
    if above < below:
        detail = f"attention.rope_scaling.{fast} = {above:g}, attention.rope_scaling.{slow} = {below:g}, and {above:g} < {below:g}"
        yield checked.error("MP715", detail, f"model.attention.rope_scaling.{fast}", f"{fast}: a number from {below:g} on")


def _odd(checked: CheckedSpec, name: str, width: int) -> Diagnostic:
    detail = f"attention.{name} = {width}, and {width} % 2 = 1"
    return checked.error("MP708", detail, f"model.attention.{name}", f"{name}: {width + 1}")


def _layers(checked: CheckedSpec, attention: GroupedQueryAttention | LatentAttention) -> Iterator[Diagnostic]:
    lists = {"model.attention.nope_layers": attention.nope_layers, "model.attention.full_layers": attention.full_layers}
    if attention.full_layers and attention.window_size is None:
        detail = f"attention.full_layers = {list(attention.full_layers)}, attention.window_size = null"
        yield checked.error("MP713", detail, "model.attention.full_layers", "give attention.window_size, or remove attention.full_layers")
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        lists["model.attention.indexer.layers"] = attention.indexer.layers
        lists["model.attention.indexer.shared_layers"] = attention.indexer.shared_layers
        yield from _shared(checked, attention, attention.indexer)
    if isinstance(attention, GroupedQueryAttention) and attention.block_indexer is not None:
        lists["model.attention.block_indexer.layers"] = attention.block_indexer.layers
    if isinstance(attention, LatentAttention):
        yield from _layer_latents(checked, attention)
    yield from _twice(checked, attention)
    listed = (*lists.items(), *(("model.attention.windows", window.layers) for window in attention.windows))
    for key, layers in listed:
        yield from rising(checked, key, layers)
        if checked.letters is not None:
            yield from _not_attention(checked, key, layers, checked.letters)


def _layer_latents(checked: CheckedSpec, attention: LatentAttention) -> Iterator[Diagnostic]:
    """Checks heads and latents of single layers: A layers, each once; a query latent only if the section has one."""
    key, seen = "model.attention.layer_latents", set[int]()
    for place, own in enumerate(attention.layer_latents):
        yield from rising(checked, key, own.layers)
        if checked.letters is not None:
            yield from _not_attention(checked, key, own.layers, checked.letters)
        if both := sorted(seen & set(own.layers)):
            yield checked.error("MP715", f"layer {both[0]} is twice in attention.layer_latents", key, f"remove {both[0]} from one of them")
        if own.q_lora_rank is not None and attention.q_lora_rank is None:
            detail = f"attention.layer_latents[{place}].q_lora_rank = {own.q_lora_rank}, attention.q_lora_rank = null"
            yield checked.error("MP715", detail, key, "give attention.q_lora_rank")
        indexer, rotated = attention.indexer, own.qk_rope_head_dim or 0
        if indexer is not None and set(own.layers) & {*indexer.layers, *indexer.shared_layers} and indexer.head_dim < rotated:
            detail = f"attention.indexer.head_dim = {indexer.head_dim}, attention.layer_latents[{place}].qk_rope_head_dim = {rotated}"
            yield checked.error("MP712", f"{detail}, and {indexer.head_dim} < {rotated}", key, f"indexer: {{head_dim: {rotated}}}")
        seen |= set(own.layers)


def _twice(checked: CheckedSpec, attention: GroupedQueryAttention | LatentAttention) -> Iterator[Diagnostic]:
    """Checks that no layer has two windows, or one and none."""
    seen = dict.fromkeys(attention.full_layers, "attention.full_layers")
    for window in attention.windows:
        for layer in window.layers:
            if layer in seen:
                detail = f"layer {layer} is in attention.windows with size = {window.size}, and in {seen[layer]}"
                yield checked.error("MP715", detail, "model.attention.windows", f"remove {layer} from one of them")
                return
        seen |= dict.fromkeys(window.layers, f"the layers with size = {window.size}")


def _shared(checked: CheckedSpec, attention: LatentAttention, indexer: Indexer) -> Iterator[Diagnostic]:
    """Checks shared choices: such a layer has no indexer, follows a layer with one, and has the same window as that layer."""
    key, own = "model.attention.indexer.shared_layers", set(indexer.layers)
    both = sorted(own & set(indexer.shared_layers))
    if both:
        detail = f"attention.indexer.shared_layers and attention.indexer.layers both have {both[0]}"
        yield checked.error("MP715", detail, key, f"remove {both[0]} from one of them")
        return
    first = min(own, default=None)
    early = [layer for layer in indexer.shared_layers if first is None or layer < first]
    if early:
        detail = f"attention.indexer.shared_layers has {early[0]}, but attention.indexer.layers has no layer before it"
        yield checked.error("MP715", detail, key, f"write {early[0]} under attention.indexer.layers")
        return
    for source, *others in indexer.groups:
        unequal = [layer for layer in others if attention.window(layer) != attention.window(source)]
        if unequal:
            sizes = [attention.window(layer) or "no" for layer in (unequal[0], source)]
            detail = f"layer {unequal[0]} shares the choice of layer {source}, and their windows are {sizes[0]} and {sizes[1]} positions"
            yield checked.error("MP715", detail, key, "give both one window, or none")


def _not_attention(checked: CheckedSpec, key: str, layers: tuple[int, ...], letters: str) -> Iterator[Diagnostic]:
    wrong = [
        f"layer {layer} is {letters[layer]}" if layer < len(letters) else f"layer {layer} is beyond the last, {len(letters) - 1}"
        for layer in layers
        if layer >= len(letters) or letters[layer] != "A"
    ]
    if wrong:
        legal = [str(index) for index, letter in enumerate(letters) if letter == "A"]
        shown = ", ".join(legal[:16]) + (" …" if len(legal) > 16 else "")
        faults = series(wrong[:6], "and") + (f" and {len(wrong) - 6} more" if len(wrong) > 6 else "")
        yield checked.error("MP706", f"{key.removeprefix('model.')}: {faults}", key, f"the A layers are {shown or 'none'}")
