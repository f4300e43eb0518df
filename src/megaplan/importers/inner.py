"""Decoders whose MLPs or heads have tensors of their own inside: learned activations."""

from __future__ import annotations

from typing import Any

from megaplan.importers.decoders import decoder
from megaplan.importers.parts import biases
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
