"""MP9xx. Hosts other than megarun: what they cannot run, their launch files, and what a plan loses on the way to them."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

HOSTS: dict[str, CodeInfo] = {
    "MP901": CodeInfo(
        "a key of another host",
        "`host` has a key that the named host does not read.",
        "The setting would be ignored.",
        "Remove it, or name the host that reads it.",
        "host: {name: megatron, kernels: triton}      # wrong: kernels is megarun's",
    ),
    "MP902": CodeInfo(
        "the host cannot run this",
        "The spec names a block, feature, dtype or degree that Megatron-Core has no counterpart for.",
        "The bytes would be those of another model or another step.",
        "Change what the message names, or plan for megarun.",
        "host: {name: megatron}\nmodel: {mamba: {kind: mamba3}}      # wrong: Megatron's M is Mamba-2",
    ),
    "MP903": CodeInfo(
        "a feature of the host that is not priced",
        "The feature makes tensors that no ledger lists.",
        "An estimate that left them out would be wrong by up to 80 %, as measured runs with offload show.",
        "Estimate without the feature, and measure what it changes.",
        "host: {name: megatron, features: [cuda_graphs]}      # wrong",
    ),
    "MP904": CodeInfo(
        "the host runs this otherwise",
        "A setting that the host has no counterpart for; no tensor depends on it.",
        "The bytes are the same; what is computed, or in which pieces, is the host's own.",
        "Nothing for planning; write the host's value to be exact.",
        "mamba: {kind: mamba2, chunk_size: 256}      # Megatron scans in chunks of 128",
    ),
}
