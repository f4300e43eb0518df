"""Decoders whose MLPs or heads have tensors of their own inside, or norms without a scale."""

from __future__ import annotations

from typing import Any

from megaplan.importers.decoders import decoder
from megaplan.importers.parts import biases, even_head_dim
from megaplan.importers.reader import ConfigReader

_LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_seq_length": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Scaling of apertus' rotary frequencies, if the config does not say."""


def apertus(reader: ConfigReader) -> dict[str, Any]:
    """apertus, and the text model of 1.5: an MLP of two matrices, whose activation has two parameters, and a norm over each head."""
    pruned = reader.value("output_vocab_size")
    reader.skip("output_vocab_size")
    if pruned not in (None, reader.value("vocab_size")):
        reader.cannot("output_vocab_size", pruned, "the head (lm_head) has fewer rows than the embedding", None)
    scaled = reader.value("rope_parameters") is None and reader.value("rope_scaling") is None
    attention = {**biases(reader), "qk_norm": True} | ({"rope_scaling": _LLAMA3} if scaled else {})
    return decoder(reader, attention, gated=False)


def nanochat(reader: ConfigReader) -> dict[str, Any]:
    """nanochat: no norm has a scale, the embedding has a norm, too; queries and keys turn before theirs, which is the same."""
    cap = reader.factor("final_logit_softcapping")
    model = {"norm": "rmsnorm_no_scale", "embedding_norm": True} | ({"logits_cap": cap} if cap is not None else {})
    return decoder(reader, {**biases(reader), "qk_norm": True, "qk_norm_scale": False}, model=model, gated=False)


def bitnet(reader: ConfigReader) -> dict[str, Any]:
    """bitnet: norms over the heads' outputs and over the MLP's inner values; linears keep their whole weights here."""
    if reader.has("head_dim"):  # no field of the class, whose norm over the heads' outputs is as wide as the stream
        even = even_head_dim(reader, reader.whole("hidden_size"), reader.whole("num_attention_heads"), None)
        reader.only("head_dim", (even, None), "the norm over the heads' outputs (attn_sub_norm) is as wide as the stream")
    attention = {**biases(reader), "output_norm": True}
    return decoder(reader, attention, head_dim=None, dense={"inner_norm": True})
