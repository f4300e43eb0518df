"""Models of torchtitan's registry by name and flavor, as sections of a spec.

Source: torchtitan/models/llama3/__init__.py, qwen3/__init__.py and deepseek_v3/__init__.py at 9810191b^, the last version with TOML
files, and llama2's of 2024; the vocabularies of llama2 and llama3 are those of the tokenizers that those files name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LLAMA3_VOCABULARY, QWEN3_VOCABULARY = 128_256, 151_936


class Experts(NamedTuple):
    """Experts of a block: their number and inner width, those of a token, the shared one's width, and how scores are made."""

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

    def section(self) -> dict[str, Any]:
        """The section `model`."""
        dense = self.dense if self.experts is not None else self.blocks
        mixed = 0 < dense < self.blocks
        sections: dict[str, Any] = {"mlp": {"ffn_hidden_size": self.ffn, "activation": "swiglu"}} if dense else {}
        if self.experts is not None:
            sections["moe"] = self.experts.section()
        return {
            "pattern": "AD" * dense + "AE" * (self.blocks - dense) if mixed else "AD" if dense else "AE",
            "num_layers": 2 * self.blocks,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "tie_embeddings": self.tied,
            "attention": self._attention(),
            **sections,
        }

    def _attention(self) -> dict[str, Any]:
        if self.q_rank is not None:
            widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
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


FLAVORS: dict[str, dict[str, Flavor]] = {
    "llama3": {
        "debugmodel": Flavor(256, 6, 16, 16, 16, 768, 2048, 500_000.0),
        "8B": Flavor(4096, 32, 32, 8, 128, 14_336, LLAMA3_VOCABULARY, 500_000.0),
        "70B": Flavor(8192, 80, 64, 8, 128, 28_672, LLAMA3_VOCABULARY, 500_000.0),
        "405B": Flavor(16_384, 126, 128, 8, 128, 53_248, LLAMA3_VOCABULARY, 500_000.0),
    },
    "llama2": {
        "7B": Flavor(4096, 32, 32, 32, 128, 11_008, 32_000, 10_000.0),
        "13B": Flavor(5120, 40, 40, 40, 128, 13_824, 32_000, 10_000.0),
        "70B": Flavor(8192, 80, 64, 8, 128, 28_672, 32_000, 10_000.0),
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
SUFFIXES = ("_attn", "_flash", "_flex", "_varlen", "_non", "_fused_qkv")
"""Ends of flavors that have the same sizes: other kernels, or one product for queries, keys and values."""
REFUSED = {
    "llama4": "scores that multiply the rows before the experts, and chunked attention, are not priced",
    "gpt_oss": "experts with biases, attention sinks and sliding windows are not priced",
    "flux": "it is no decoder of text",
}
"""Flavors, or whole models, of the registry that have no spec, and the reason."""
