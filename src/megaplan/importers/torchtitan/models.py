"""Models of torchtitan's registry by name and flavor, as sections of a spec.

Source: torchtitan/models/llama3/__init__.py and qwen3/__init__.py at 9810191b^, the last version with TOML files; llama3's vocabulary is
that of Llama 3's tokenizer, which those files name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LLAMA3_VOCABULARY, QWEN3_VOCABULARY = 128_256, 151_936


class Flavor(NamedTuple):
    """Dimensions of a dense decoder.

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

    def section(self) -> dict[str, Any]:
        """The section `model`."""
        attention: dict[str, Any] = {
            "kind": "gqa",
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
        }
        return {
            "pattern": "AD",
            "num_layers": 2 * self.blocks,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "tie_embeddings": self.tied,
            "attention": attention | ({"qk_norm": True} if self.qk_norm else {}),
            "mlp": {"ffn_hidden_size": self.ffn, "activation": "swiglu"},
        }


def _qwen3(hidden: int, blocks: int, heads: int, ffn: int, *, tied: bool = False) -> Flavor:
    return Flavor(hidden, blocks, heads, 8, 128, ffn, QWEN3_VOCABULARY, 1_000_000.0, qk_norm=True, tied=tied)


FLAVORS: dict[str, dict[str, Flavor]] = {
    "llama3": {
        "debugmodel": Flavor(256, 6, 16, 16, 16, 768, 2048, 500_000.0),
        "8B": Flavor(4096, 32, 32, 8, 128, 14_336, LLAMA3_VOCABULARY, 500_000.0),
        "70B": Flavor(8192, 80, 64, 8, 128, 28_672, LLAMA3_VOCABULARY, 500_000.0),
        "405B": Flavor(16_384, 126, 128, 8, 128, 53_248, LLAMA3_VOCABULARY, 500_000.0),
    },
    "qwen3": {
        "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
        "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
        "4B": _qwen3(2560, 36, 32, 9728, tied=True),
        "8B": _qwen3(4096, 36, 32, 12_288),
        "14B": _qwen3(5120, 40, 40, 17_408),
        "32B": _qwen3(5120, 64, 64, 25_600),
    },
}
REFUSED = {
    "llama3/8B_flex": "flex attention's block masks are not priced",
    "llama3/8B_varlen": "attention over packed documents is not priced",
    "qwen3/30B-A3B": "experts and their token dispatchers are not priced",
    "qwen3/235B-A22B": "experts and their token dispatchers are not priced",
    "llama4": "experts, their token dispatchers and chunked attention are not priced",
    "deepseek_v3": "experts, their token dispatchers and latent attention are not priced",
    "gpt_oss": "experts, their token dispatchers and attention sinks are not priced",
    "flux": "it is no decoder of text",
}
"""Flavors, or whole models, of the registry that have no spec, and the reason."""
