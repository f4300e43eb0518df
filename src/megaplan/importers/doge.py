"""Doge: each channel of the stream has a factor before a block adds to it, and keys add numbers to their scores."""

from typing import Any

from megaplan.importers.decoders import decoder
from megaplan.importers.parts import SLIDING, biases
from megaplan.importers.reader import ConfigReader


def doge(reader: ConfigReader) -> dict[str, Any]:
    """doge: a dense MLP in every layer; its experts of one row each are refused."""
    if reader.flag("is_moe"):
        reader.cannot(
            "is_moe", True, "an expert is one row of an embedding (down_embed, up_embed), chosen by product keys (router_gate)", False
        )
    reader.skip("num_experts", "num_experts_per_tok", "norm_topk_prob")
    window = reader.whole("keep_window_size")
    reader.warn(
        "keep_window_size", window, "in the original a token attends to that many keys, those with the largest scores; here to all keys"
    )
    attention = biases(reader) | {"qk_norm": True, "key_bias": True}
    return decoder(reader, attention, mlp_bias=reader.flag("mlp_bias"), windowed=SLIDING, model={"stream_scale": True}, head_dim=None)
