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
    "MP910": CodeInfo(
        "not Megatron's hybrid pattern",
        "The text has a symbol that is none, mixes kinds of attention, or has unlike prediction modules.",
        "Megatron refuses it at the start of the run.",
        "Write one symbol a layer, '|' between stages, and '/' before each prediction module.",
        "--hybrid-layer-pattern 'M*M*/MM/M*'      # wrong: the modules differ",
    ),
    "MP911": CodeInfo(
        "Megatron's stages do not fit",
        "The pattern's segments or the layout's stages do not divide over the pipeline ranks, or hold other layers than the model has.",
        "Megatron refuses it at the start of the run.",
        "Write as many stages as ranks, or a multiple of them.",
        "--hybrid-layer-pattern 'M|M|M' --pipeline-model-parallel-size 2      # wrong",
    ),
    "MP912": CodeInfo(
        "not Megatron's pipeline layout",
        "The text has a token that is none, or a repetition that Megatron does not expand.",
        "Megatron refuses it at the start of the run.",
        "Use E, t, m, L, '|', x*n and (...)*n; groups never stand inside each other.",
        "--pipeline-model-parallel-layout 'Et*3|((tt|)*2)*3L'      # wrong",
    ),
    "MP913": CodeInfo(
        "an argument that the import does not know",
        "The argument is none of those that the import reads, and none of those known to be irrelevant.",
        "Ignoring it might leave out a part of the model or of its memory.",
        "Remove it from a copy of the file if it changes no tensor.",
        "--num-registers 4      # wrong",
    ),
    "MP914": CodeInfo(
        "an argument that a spec cannot express",
        "The argument gives the model tensors, or the run a layout, that no key of a spec describes.",
        "Leaving it out would estimate another run.",
        "Plan another model, or write the value that the hint names in a copy of the file.",
        "--normalization LayerNorm      # wrong: norms of a spec are RMSNorm",
    ),
    "MP915": CodeInfo(
        "arguments that a spec does not carry",
        "The arguments change values or files alone; no tensor depends on them.",
        "The estimate is the same; a run launched from an export of the spec would not have them.",
        "Nothing for planning; add them to an exported launch by hand.",
        "--moe-router-topk-scaling-factor 2.5",
    ),
    "MP916": CodeInfo(
        "an argument is missing or of the wrong type",
        "An argument that shapes need is not there, or its value is of another type.",
        "Megatron has no default for it, or refuses it too.",
        "Write the argument with the value that the run has.",
        "--hidden-size 4k      # wrong",
    ),
    "MP917": CodeInfo(
        "the launch does not say how many GPUs",
        "No torchrun line or --gpus states the world size, so the smallest that the degrees allow stands.",
        "Optimizer state is sharded over the data ranks: more of them make it smaller.",
        "Give --gpus, or import a file with its torchrun line.",
        "megaplan import megatron launch.sh --gpus 64",
    ),
    "MP920": CodeInfo(
        "the host cannot express this",
        "The exported file does not say this key of the plan, or says the nearest that the host has.",
        "The run that is launched from it differs from the plan there.",
        "Change the plan, launch it otherwise, or accept the difference; --strict refuses it.",
        "megaplan export plan.json --to nanotron --strict",
    ),
    "MP921": CodeInfo(
        "no model of the host has these blocks",
        "The host's configuration names a model of its own, and none is built of the plan's layers.",
        "There is nothing that a file could say.",
        "Export to a host that takes hybrids, or to one whose model is your own code.",
        "megaplan export plan.json --to maxtext      # wrong for a model with Mamba layers",
    ),
}
