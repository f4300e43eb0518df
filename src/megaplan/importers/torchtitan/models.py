"""Models of torchtitan's registry by name and flavor, as sections of a spec.

Source: torchtitan/models/llama3/__init__.py, and those of llama4, qwen3 and deepseek_v3, at 9810191b^, the last version with TOML files;
gpt_oss of 2026, and llama2 of 2024. Vocabularies of llama2 and llama3 are from the tokenizers that these files name.
"""

import json
import re
from difflib import SequenceMatcher, get_close_matches
from math import inf, log
from typing import Any, NamedTuple

from megaplan.importers.hf import import_hf
from megaplan.importers.megatron.meant import letters

LLAMA3_VOCABULARY, LLAMA4_VOCABULARY, QWEN3_VOCABULARY = 128_256, 202_048, 151_936
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Widths of latent attention, with the defaults of deepseek_v3's arguments."""


class Experts(NamedTuple):
    """Experts of a block: their number and inner width, number per token, the shared expert's width, and the score function."""

    number: int
    top_k: int
    ffn: int
    shared: int = 0
    score: str = "softmax"
    normed: bool = False
    scale: float = 1.0

    def section(self) -> dict[str, Any]:
        """The section `model.moe`."""
        found = {"num_experts": self.number, "top_k": self.top_k, "ffn_hidden_size": self.ffn, "activation": "swiglu"}
        given = {"shared_ffn_hidden_size": (self.shared, 0), "score": (self.score, "softmax"), "routed_scale": (self.scale, 1.0)}
        return {**found, **{key: value for key, (value, default) in given.items() if value != default}, "normalize_top_k": self.normed}


class Flavor(NamedTuple):
    """Dimensions of a decoder.

    Attributes:
        hidden: Width of the residual stream.
        blocks: Transformer blocks.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        ffn: Inner width of the MLP.
        vocab: Rows of the embedding.
        rope_theta: Base of the rotary angles.
        qk_norm: True if queries and keys have norms.
        tied: True if embedding and head share one table.
        experts: Experts in place of the MLP; None for a dense decoder.
        dense: First blocks that have the MLP all the same.
        q_rank: Width of the queries' latent under latent attention, 0 without one; None for grouped queries.
        every: Period of blocks with experts: the last of each `every` blocks.
        latent: Widths of latent attention, as `LATENT` lists them.
        scored_first: True if rows are multiplied by their scores before the experts.
    """

    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    qk_norm: bool = False
    tied: bool = False
    experts: Experts | None = None
    dense: int = 0
    q_rank: int | None = None
    every: int = 1
    latent: tuple[int, ...] = tuple(LATENT.values())
    scored_first: bool = False

    def section(self) -> dict[str, Any]:
        """The section `model`."""
        routed = [self.has_experts(block) for block in range(self.blocks)]
        sections: dict[str, Any] = {} if all(routed) else {"mlp": {"ffn_hidden_size": self.ffn, "activation": "swiglu"}}
        if self.experts is not None and any(routed):
            sections["moe"] = self.experts.section()
        mixed = any(routed) and not all(routed)
        return {
            "pattern": "".join("AE" if each else "AD" for each in routed) if mixed else "AE" if any(routed) else "AD",
            "num_layers": 2 * self.blocks,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "tie_embeddings": self.tied,
            "attention": self._attention(),
            **sections,
        }

    def has_experts(self, block: int) -> bool:
        """True if a block has experts in place of the MLP."""
        return self.experts is not None and block >= self.dense and (block + 1) % self.every == 0

    def _attention(self) -> dict[str, Any]:
        if self.q_rank is not None:
            widths = dict(zip(LATENT, self.latent, strict=True))
            return {"kind": "mla", "num_heads": self.heads, "q_lora_rank": self.q_rank or None, **widths, "rope_theta": self.rope_theta}
        found: dict[str, Any] = {
            "kind": "gqa",
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
        }
        return found | ({"qk_norm": True} if self.qk_norm else {})


def _qwen3(hidden: int, blocks: int, heads: int, ffn: int, *, tied: bool = False) -> Flavor:
    return Flavor(hidden, blocks, heads, 8, 128, ffn, QWEN3_VOCABULARY, 1_000_000.0, qk_norm=True, tied=tied)


def _qwen3_moe(hidden: int, blocks: int, heads: int, rope_theta: float, inner: int) -> Flavor:
    experts = Experts(128, 8, inner, normed=True)
    return Flavor(hidden, blocks, heads, 4, 128, 0, QWEN3_VOCABULARY, rope_theta, qk_norm=True, experts=experts)


def _deepseek(hidden: int, blocks: int, heads: int, ffn: int, vocab: int, experts: Experts, *, dense: int = 1, q_rank: int = 0) -> Flavor:
    return Flavor(hidden, blocks, heads, heads, 192, ffn, vocab, 10_000.0, experts=experts, dense=dense, q_rank=q_rank)


def _llama4(experts: int, every: int) -> Flavor:
    inner = Experts(experts, 1, 8192, 8192, "sigmoid")
    return Flavor(5120, 48, 40, 8, 128, 16_384, LLAMA4_VOCABULARY, 500_000.0, experts=inner, every=every, scored_first=True)


FLAVORS: dict[str, dict[str, Flavor]] = {
    "llama3": {
        "debugmodel": Flavor(256, 6, 16, 16, 16, 768, 2048, 500_000.0),
        "1B": Flavor(2048, 16, 32, 8, 64, 8192, LLAMA3_VOCABULARY, 500_000.0, tied=True),
        "3B": Flavor(3072, 28, 24, 8, 128, 8192, LLAMA3_VOCABULARY, 500_000.0, tied=True),
        "8B": Flavor(4096, 32, 32, 8, 128, 14_336, LLAMA3_VOCABULARY, 500_000.0),
        "70B": Flavor(8192, 80, 64, 8, 128, 28_672, LLAMA3_VOCABULARY, 500_000.0),
        "405B": Flavor(16_384, 126, 128, 8, 128, 53_248, LLAMA3_VOCABULARY, 500_000.0),
    },
    "llama2": {
        "7B": Flavor(4096, 32, 32, 32, 128, 11_008, 32_000, 10_000.0),
        "13B": Flavor(5120, 40, 40, 40, 128, 13_824, 32_000, 10_000.0),
        "70B": Flavor(8192, 80, 64, 8, 128, 28_672, 32_000, 10_000.0),
    },
    "llama4": {
        "debugmodel": Flavor(
            256, 6, 16, 16, 16, 768, 2048, 500_000.0, experts=Experts(8, 1, 512, 512, "sigmoid"), every=2, scored_first=True
        ),
        "17bx16e": _llama4(16, 1),
        "17bx128e": _llama4(128, 2),
    },
    "qwen3": {
        "debugmodel": Flavor(256, 8, 16, 8, 128, 3072, 2048, 1_000_000.0, qk_norm=True, tied=True),
        "debugmodel_moe": Flavor(256, 8, 16, 8, 128, 0, 2048, 1_000_000.0, qk_norm=True, experts=Experts(64, 8, 768, normed=True)),
        "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
        "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
        "4B": _qwen3(2560, 36, 32, 9728, tied=True),
        "8B": _qwen3(4096, 36, 32, 12_288),
        "14B": _qwen3(5120, 40, 40, 17_408),
        "32B": _qwen3(5120, 64, 64, 25_600),
        "30B-A3B": _qwen3_moe(2048, 48, 32, 1_000_000.0, 768),
        "235B-A22B": _qwen3_moe(4096, 94, 64, 5_000_000.0, 1536),
    },
    "deepseek_v3": {
        "debugmodel": _deepseek(256, 6, 16, 1024, 2048, Experts(8, 3, 256, 512)),
        "16B": _deepseek(2048, 27, 16, 10_944, 102_400, Experts(64, 6, 1408, 2816)),
        "236B": _deepseek(5120, 60, 128, 12_288, 102_400, Experts(160, 6, 1536, 3072, scale=16.0), q_rank=1536),
        "671B": _deepseek(
            7168, 61, 128, 18_432, 129_280, Experts(256, 8, 2048, 2048, "sigmoid", normed=True, scale=2.5), dense=3, q_rank=1536
        ),
    },
}
GPT_OSS = {
    "debugmodel": {"num_hidden_layers": 4, "num_local_experts": 8, "hidden_size": 256, "vocab_size": 2048},
    "20b": {"num_hidden_layers": 24, "num_local_experts": 32},
    "120b": {"num_hidden_layers": 36, "num_local_experts": 128},
}
"""Flavors of gpt_oss, whose class has the sizes of transformers' configuration."""
OSS = "gpt_oss"
MODELS = (*FLAVORS, OSS)
"""Models of the registry that have a spec."""


def gpt_oss(fields: dict[str, int]) -> dict[str, Any]:
    """The section `model` of a flavor of gpt_oss, as the importer of published configurations has it."""
    return dict(import_hf(json.dumps({"model_type": "gpt_oss", **fields}), "gpt_oss.json").document["model"])


def flavors_of(name: str) -> tuple[str, ...]:
    """Flavors of a model of the registry; empty for other models."""
    return (*FLAVORS.get(name, {}), *(GPT_OSS if name == OSS else ()))


def nearest(name: str, flavor: str) -> str | None:
    """The NAME/FLAVOR of the registry that resembles a model most: a flavor of the model itself, or of one whose name is similar.

    Args:
        name: Name of a model, of the registry or a fork's own.
        flavor: A flavor that the registry lacks; if it begins with a known flavor, that one is nearest.
    """
    models = [name] if name in MODELS else get_close_matches(name, MODELS, len(MODELS), LEAST_LIKE)
    known = [(model, each) for model in models for each in flavors_of(model)]
    if not known:
        return None
    model, closest = max(known, key=lambda one: _likeness(flavor.lower(), one[1].lower()))
    return f"{model}/{closest}"


def _likeness(one: str, other: str) -> tuple[int, float, float]:
    """Length of the known flavor that the other begins with, closeness of their billions of parameters, and likeness of their letters."""
    found = [re.match(r"(\d+(?:\.\d+)?)b", each) for each in (one, other)]
    counts = [float(each[1]) for each in found if each is not None and float(each[1])]
    close = -abs(log(counts[0] / counts[1])) if len(counts) > 1 else -inf
    return len(other) if one.startswith(other) else 0, close, SequenceMatcher(None, one, other, autojunk=False).ratio()


def section_of(model: str) -> dict[str, Any]:
    """The section `model` of a NAME/FLAVOR of the registry."""
    name, _, flavor = model.partition("/")
    return gpt_oss(GPT_OSS[flavor]) if name == OSS else FLAVORS[name][flavor].section()


LEAST_LIKE = 0.7
"""Likeness (0 to 1) of a model's name to one in the registry from which it counts as a version of that model."""
SUFFIXES = ("_attn", "_flash", "_flex", "_varlen", "_non", "_fused_qkv", "_deepep", "_hybridep")
"""Ends of flavors that have the same sizes: other kernels, or one product for queries, keys and values."""
REFUSED = {
    **{f"llama4/{each}_irope": "attention in chunks is not priced" for each in ("debugmodel", "17bx16e", "17bx128e")},
    "flux": "it is no decoder of text",
    "qwen3_5": "gated delta nets among its attention have no counterpart in host torchtitan",
    "kimi_k2_7": "its encoder of images has no counterpart in host torchtitan",
    "deepseek_v32": "the indexer of its attention has no counterpart in host torchtitan",
    "deepseek_v4": "compressed keys and several residual streams have no counterpart in host torchtitan",
    "muse_glimmer": "norms of embeddings and a capped head have no counterpart in host torchtitan",
}
"""Flavors, or models, of the registry that have no spec, and the reason."""


def registered(name: str) -> str:
    """The registry's name of a model whose letters and digits are the same, as `deepseek_v32` for `DeepSeek-V3.2`; else the name itself."""
    known = (*MODELS, *(each for each in REFUSED if "/" not in each))
    return next((each for each in known if letters(each) == letters(name)), name)
