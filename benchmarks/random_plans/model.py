"""The architecture of a random plan: every family and kind, odd and prime sizes, such that every degree divides what it shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megaplan.families.registry import FAMILIES
from random_plans.choices import Draw, Scope, Size, divisors
from random_plans.families import linear_attention, short_convolution
from random_plans.layout import Degrees

PRIMES = (61, 251, 1009, 4093, 8191, 20011, 32003, 50021, 65537, 131071)
VOCABULARIES = (*PRIMES, 64, 1024, 32000, 32768, 65536, 151936)
STATES = (5, 8, 11, 16, 32, 64, 96, 128, 129)
ACTIVATIONS = ("swiglu", "relu2", "gelu")


@dataclass(frozen=True, slots=True)
class Shape:
    """Inputs of the draw of every family's section.

    Attributes:
        hidden: Width of the residual stream.
        tp: Divides heads, groups and widths.
        letters: One a layer.
        size: Bounds of widths.
        scope: Scope of the draw.
        megatron: True if the host is Megatron, which has fewer kinds.
    """

    hidden: int
    tp: int
    letters: str
    size: Size
    scope: Scope
    megatron: bool

    def layers(self, letter: str) -> list[int]:
        """Global indices of a letter's layers."""
        return [index for index, own in enumerate(self.letters) if own == letter]


def draw_letters(draw: Draw, degrees: Degrees, *, megatron: bool, gpt: bool) -> tuple[str, str]:
    """A pattern without bars, and one letter a layer."""
    count = degrees.num_layers
    if gpt:
        pattern = "A" + draw.choice("DE")
        return pattern, pattern * max(count // 2, degrees.slots)
    chosen = draw.sample("AMED" if megatron else "AMERD", draw.weighted({1: 3, 2: 4, 3: 2, 4: 1}))
    pattern = "".join([*chosen, *(draw.choice(chosen) for _ in range(draw.randint(0, 4)))])
    pattern = "".join(draw.sample(pattern, len(pattern)))
    if len(pattern) > count and draw.chance(0.9):
        pattern = pattern[:count]
    return pattern, (pattern * count)[:count]


def draw_hidden(draw: Draw, size: Size, *, tp: int) -> int:
    """A multiple of 64 or 8, an odd or a prime width."""
    unit = draw.weighted({64: 4, 8: 3, 1: 2})
    least, most = size.hidden
    return draw.multiple(min(unit, least) * tp if unit > 1 else 1, least, most)


def model_section(
    draw: Draw, degrees: Degrees, shape: Shape, pattern: str, sharded: dict[str, int], *, tie: float = 0.35
) -> dict[str, Any]:
    """`model`.

    Args:
        draw: The stream.
        degrees: Degrees that must divide the sizes.
        shape: Widths and letters.
        pattern: Pattern in the spec's form.
        sharded: `ep` and `etp`.
        tie: Share of plans with tied embeddings.
    """
    vocab_size = draw.choice([number for number in VOCABULARIES if number <= shape.size.vocabulary])
    if degrees.vocab_parallel:
        vocab_size = max(1, vocab_size // shape.tp) * shape.tp
    model: dict[str, Any] = {
        "pattern": pattern,
        "num_layers": len(shape.letters),
        "hidden_size": shape.hidden,
        "vocab_size": vocab_size,
    }
    draw.maybe(model, 0.2, norm_eps=lambda: draw.choice([1e-6, 1e-5, 1e-8]))
    if draw.chance(tie):
        model["tie_embeddings"] = True
    activation = draw.choice(ACTIVATIONS)
    for letter, draw_section in _FAMILIES.items():
        section = FAMILIES[letter].section
        if letter in shape.letters:
            model[section] = draw_section(draw, shape, sharded)
            if shape.megatron and "activation" in model[section]:
                model[section]["activation"] = activation
    features = _features(draw, shape)
    if features or draw.chance(0.05):
        model["features"] = features
    if "mtp" in features and model["attention"].get("head_dim", 0) % 2:
        model["attention"]["head_dim"] += 1  # a depth rotates
    if shape.megatron and "mtp" in features:
        activation = "relu2"
        for section in ("mlp", "moe"):
            if section in model:
                model[section]["activation"] = activation
        if "mlp" in model:
            features["mtp"]["ffn_hidden_size"] = model["mlp"]["ffn_hidden_size"]
    return model


def _attention(draw: Draw, shape: Shape, _: dict[str, int]) -> dict[str, Any]:
    layers = shape.layers("A")
    section: dict[str, Any] = _latent(draw, shape) if draw.chance(0.45) else _grouped(draw, shape)
    draw.maybe(section, 0.3, rope_theta=lambda: draw.choice([500_000.0, 10_000.0, 1_000.0]))
    if section["kind"] == "gqa" or not shape.megatron:
        draw.maybe(section, 0.35, window_size=lambda: draw.wide(1, 1500))
        if "window_size" in section and (full := draw.some(layers)):
            section["full_layers"] = full
    nope = layers if draw.chance(0.1) else [] if shape.megatron else draw.some(layers)
    if nope and draw.chance(0.5):
        section["nope_layers"] = nope
    if section["kind"] == "gqa" and section.get("nope_layers") == layers and draw.chance(0.5):
        section["head_dim"] += 1  # odd, which rotation cannot have
    return section


def _grouped(draw: Draw, shape: Shape) -> dict[str, Any]:
    key_heads = shape.tp * draw.weighted({1: 4, 2: 2, 3: 1, 5: 1})
    heads = key_heads * draw.weighted({1: 3, 2: 2, 3: 2, 4: 1, 7: 1})
    section: dict[str, Any] = {
        "kind": "gqa",
        "num_heads": heads,
        "num_kv_heads": key_heads,
        "head_dim": 2 * draw.wide(2 if shape.size.head < 64 else 4, shape.size.head),
    }
    draw.maybe(section, 0.35, qk_norm=True, bias=True)
    return section


def _latent(draw: Draw, shape: Shape) -> dict[str, Any]:
    section: dict[str, Any] = {
        "kind": "mla",
        "num_heads": shape.tp * draw.wide(1, 9),
        "q_lora_rank": None if draw.chance(0.3) else draw.wide(8, shape.size.width),
        "kv_lora_rank": draw.wide(8, min(512, shape.size.width)),
        "qk_nope_head_dim": draw.wide(4, shape.size.head * 3 // 2),
        "qk_rope_head_dim": 2 * draw.wide(1, shape.size.head * 3 // 8),
        "v_head_dim": draw.wide(4, shape.size.head * 3 // 2),
    }
    if section["q_lora_rank"] is not None and not shape.megatron and draw.chance(0.5):
        width = section["qk_rope_head_dim"] + draw.randint(0, shape.size.head * 5 // 16)
        layers = draw.some(shape.layers("A")) or shape.layers("A")
        section["indexer"] = {"num_heads": draw.wide(1, 9), "head_dim": width, "layers": layers}
        draw.maybe(section["indexer"], 0.6, top_k=lambda: draw.wide(1, 3000))
        draw.maybe(section["indexer"], 0.3, loss_coefficient=0.5)
    return section


def _mamba(draw: Draw, shape: Shape, _: dict[str, int]) -> dict[str, Any]:
    third = draw.chance(0.5) and not shape.megatron
    section: dict[str, Any] = {
        "kind": "mamba3" if third else "mamba2",
        "state_dim": draw.choice([state for state in STATES if (state > 12) == (shape.size.head > 12)]),
    }
    if not third and draw.chance(0.5):
        heads = shape.tp * draw.wide(1, 24)
        section |= {"num_heads": heads, "head_dim": draw.wide(min(8, shape.size.head // 3), shape.size.head)}
        draw.maybe(section, 0.3, expand=3)
    else:
        expand = draw.weighted({2: 4, 1: 1, 3: 1})
        if expand * shape.hidden % shape.tp:  # otherwise a tensor rank would not get a whole number of heads
            expand = shape.tp
        inner = expand * shape.hidden
        fitting = [size for size in divisors(inner) if inner // size % shape.tp == 0]
        section["head_dim"] = draw.choice([size for size in fitting if shape.size.head // 16 <= size <= 160] or fitting)
        heads = inner // section["head_dim"]
        if expand != 2:
            section["expand"] = expand
    groups = [count for count in divisors(heads) if count % shape.tp == 0 and count <= 8 * shape.tp]
    section["num_groups"] = draw.choice(groups)
    if third:
        draw.maybe(section, 0.5, mimo_rank=lambda: draw.choice([2, 3, 4]))
        draw.maybe(section, 0.5, num_angles=lambda: draw.randint(1, section["state_dim"] // 2))
    elif not shape.megatron:
        draw.maybe(section, 0.3, conv_kernel=lambda: draw.choice([2, 3, 5]), conv_bias=False)
    spans = [16, 64, 100, 128] if shape.size.head > 12 else [3, 8, 16]
    draw.maybe(section, 0.6, chunk_size=lambda: draw.choice(spans))
    if third:
        draw.maybe(section, 0.3, rate_activation="heavy_tail", save_every=lambda: draw.choice(spans))
    elif not shape.megatron:
        draw.maybe(section, 0.2, time_step_min=1e-3, time_step_max=0.1)
    return section


def _experts(draw: Draw, shape: Shape, sharded: dict[str, int]) -> dict[str, Any]:
    count = sharded.get("ep", 1) * draw.weighted({1: 2, 2: 2, 3: 1, 4: 2, 7: 1, 8: 1})
    top_k = min(count, draw.weighted({1: 2, 2: 4, 3: 1, 4: 1, 8: 1}))
    section: dict[str, Any] = {
        "num_experts": count,
        "top_k": top_k,
        "ffn_hidden_size": draw.multiple(sharded.get("etp", 1), 32, shape.size.width),
        "activation": draw.choice(ACTIVATIONS),
    }
    draw.maybe(section, 0.4, shared_ffn_hidden_size=lambda: draw.multiple(shape.tp, 32, shape.size.width))
    draw.maybe(section, 0.3, normalize_top_k=False, balance_loss_coefficient=0.01, z_loss_coefficient=1e-3)
    if count > top_k and draw.chance(0.35):
        section["routing_skew"] = round(1 + draw.random() * min(3.0, count / top_k - 1), 2)
        section["routing_skew"] = min(section["routing_skew"], count / top_k)
    if shape.scope is Scope.ANY and not shape.megatron and draw.chance(0.1):
        section["capacity_factor"] = round(draw.uniform(0.5, 1.0) * count / top_k, 2)
        section["capacity_factor"] = min(section["capacity_factor"], count / top_k)
    return section


def limit_experts(draw: Draw, model: dict[str, Any], *, megatron: bool) -> None:
    """Maybe null experts, or experts that choose; a capacity of each expert, and what it drops."""
    moe = model.get("moe")
    if moe is None:
        return
    _choose_otherwise(draw, moe, megatron=megatron)
    if draw.chance(0.15):
        most = moe["num_experts"] / moe["top_k"]
        moe["capacity_factor"] = min(round(draw.uniform(0.4, 1.0) * most, 2), most)
    if "capacity_factor" in moe and not moe.get("expert_choice"):
        draw.maybe(moe, 0.5, capacity_drop="position")


def _choose_otherwise(draw: Draw, moe: dict[str, Any], *, megatron: bool) -> None:
    """Choices for which Megatron-Core has no price."""
    chosen, grouped = draw.weighted({"": 8, "null": 1, "choice": 1}), moe.get("num_groups", 1) > 1
    if megatron or grouped:
        return
    if chosen == "null":
        moe["null_experts"] = draw.randint(1, 4)
    elif chosen == "choice" and not moe.keys() & {"expert_bias", "score_correction"}:
        moe["expert_choice"] = True
        moe.pop("balance_loss_coefficient", None)


def _recurrent(draw: Draw, shape: Shape, _: dict[str, int]) -> dict[str, Any]:
    section: dict[str, Any] = {
        "kind": "m2rnn",
        "num_heads": shape.tp * draw.wide(1, 24),
        "key_dim": draw.wide(4, shape.size.head * 3 // 4),
        "value_dim": draw.wide(4, shape.size.head * 3 // 4),
    }
    draw.maybe(section, 0.4, conv_kernel=lambda: draw.choice([2, 3, 5]), save_every=lambda: draw.choice([16, 33, 100]))
    return section


def _mlp(draw: Draw, shape: Shape, _: dict[str, int]) -> dict[str, Any]:
    section: dict[str, Any] = {"ffn_hidden_size": draw.multiple(shape.tp, 32, 3 * shape.size.width)}
    draw.maybe(section, 1.0 if shape.megatron else 0.7, activation=lambda: draw.choice(ACTIVATIONS))
    return section


def _features(draw: Draw, shape: Shape) -> dict[str, Any]:
    features: dict[str, Any] = {}
    attends = "A" in shape.letters
    if attends and draw.chance(0.2):
        features["mtp"] = {"depth": draw.weighted({1: 3, 2: 1}), "ffn_hidden_size": draw.multiple(shape.tp, 32, 2 * shape.size.width)}
        draw.maybe(features["mtp"], 0.3, loss_weight=0.1)
    if shape.megatron:
        return features
    if draw.chance(0.2):
        tables: Sequence[int] = (1, 2, 3, 5, 8)
        features["ngram"] = {
            "num_tables": draw.choice(tables),
            "num_rows": draw.wide(8, min(300_000, 100 * shape.size.width)),
            "dim": draw.wide(4, min(64, shape.size.width)),
        }
        draw.maybe(features["ngram"], 0.4, max_order=lambda: draw.randint(2, 6))
    for name, share in (("structure", 0.2), ("platform", 0.05)):
        if (name == "structure" or shape.scope is Scope.ANY) and draw.chance(share):
            features[name] = {"num_categories": draw.randint(2, 60), "bottleneck": draw.wide(4, min(200, shape.size.width))}
    if shape.scope is Scope.ANY and attends and draw.chance(0.05):
        features["relation_bias"] = {"num_relations": draw.randint(2, 40)}
    return features


PLATFORM_SHARE, RELATIONS_SHARE = 0.1, 0.12


def add_later_features(stream: Callable[[str], Draw], model: dict[str, Any], shape: Shape) -> None:
    """Features that plans of megarun did not always have, each in its own stream."""
    draw = stream("platform")
    if shape.scope is Scope.RUNTIME and draw.chance(PLATFORM_SHARE):
        section = {"num_categories": draw.randint(5, 60), "bottleneck": draw.wide(4, min(200, shape.size.width))}
        model["features"] = {**model.get("features", {}), "platform": section}
    draw, attends = stream("relations"), "A" in shape.letters and "indexer" not in model["attention"]
    if shape.scope is Scope.RUNTIME and attends and draw.chance(RELATIONS_SHARE):
        model["features"] = {**model.get("features", {}), "relation_bias": {"num_relations": draw.wide(2, 256)}}


_FAMILIES = {
    "A": _attention, "M": _mamba, "E": _experts, "R": _recurrent, "D": _mlp, "G": linear_attention, "C": short_convolution,
}  # fmt: skip
