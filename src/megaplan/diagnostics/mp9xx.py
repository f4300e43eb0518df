"""MP9xx. Hosts other than megarun: what they cannot run, their launch files, and what an export cannot express."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

HOSTS: dict[str, CodeInfo] = {
    "MP901": CodeInfo(
        "a key of another host",
        "`host` has a key that the named host does not read.",
        "The setting would be ignored.",
        "Remove it, or set `host.name` to the host that reads it.",
        "host: {name: megatron, kernels: triton}      # wrong: kernels is megarun's",
    ),
    "MP902": CodeInfo(
        "the host does not support this",
        "The spec has a block, feature, dtype or degree that the host does not support, or whose tensors are not listed for it.",
        "The estimate would be of another model or another step.",
        "Change the setting that the message names, or plan for another host.",
        "host: {name: megatron}\nmodel: {mamba: {kind: mamba3}}      # wrong: Megatron's M is Mamba-2",
    ),
    "MP903": CodeInfo(
        "a feature of the host that is not estimated",
        "The feature allocates tensors that no ledger lists.",
        "An estimate without them would be wrong by up to 80 %, as measured runs with offload show.",
        "Estimate without the feature, and measure what it changes.",
        "host: {name: megatron, features: [cuda_graphs]}      # wrong",
    ),
    "MP904": CodeInfo(
        "the host implements this differently",
        "The host has no counterpart of the setting; no tensor depends on it.",
        "The bytes are the same; the computed values, or their chunking, are the host's own.",
        "No action is needed for planning; use the host's value to be exact.",
        "mamba: {kind: mamba2, chunk_size: 256}      # Megatron scans in chunks of 128",
    ),
    "MP905": CodeInfo(
        "an option that is estimated for Megatron alone",
        "megarun's ledger has no tensors for this option of the model.",
        "The estimate would leave its tensors out.",
        "Take the default, or plan for Megatron-Core.",
        "host: {name: megarun}\nattention: {kind: mla, latent_norm: false}      # wrong",
    ),
    "MP910": CodeInfo(
        "not Megatron's hybrid pattern",
        "The text has an unknown symbol, mixes kinds of attention, or has prediction modules that differ.",
        "Megatron refuses it at the start of the run.",
        "Write one symbol per layer, '|' between stages, and '/' before each prediction module.",
        "--hybrid-layer-pattern 'M*M*/MM/M*'      # wrong: the modules differ",
    ),
    "MP911": CodeInfo(
        "Megatron's stages do not fit",
        "The pattern's segments or the layout's stages are not a multiple of the pipeline ranks, or do not have the model's layers.",
        "Megatron refuses it at the start of the run.",
        "Write as many stages as ranks, or a multiple of them.",
        "--hybrid-layer-pattern 'M|M|M' --pipeline-model-parallel-size 2      # wrong",
    ),
    "MP912": CodeInfo(
        "not Megatron's pipeline layout",
        "The text has an unknown token, or a repetition that Megatron does not expand.",
        "Megatron refuses it at the start of the run.",
        "Use E, t, m, L, '|', x*n and (...)*n; groups cannot be nested.",
        "--pipeline-model-parallel-layout 'Et*3|((tt|)*2)*3L'      # wrong",
    ),
    "MP913": CodeInfo(
        "the importer does not know an argument",
        "The argument is neither among those that the importer reads nor among those known to be irrelevant.",
        "Ignoring it might omit a part of the model or of its memory.",
        "Remove it from a copy of the file if it changes no tensor.",
        "--num-registers 4      # wrong",
    ),
    "MP914": CodeInfo(
        "a spec cannot express an argument",
        "The argument adds tensors to the model, or a layout to the run, that no key of a spec describes.",
        "Without it the estimate would be of another run.",
        "Plan another model, or write the value that the hint names in a copy of the file.",
        "--fp4-format e2m1      # wrong: weights in 4 bits are not priced",
    ),
    "MP915": CodeInfo(
        "the spec has no counterpart of some arguments",
        "The arguments change only values or files; no tensor depends on them.",
        "The estimate is the same; a run launched from an export of the spec would not have them.",
        "No action is needed for planning; add them to an exported launch file by hand.",
        "--moe-router-topk-scaling-factor 2.5",
    ),
    "MP916": CodeInfo(
        "an argument is missing or has the wrong type",
        "An argument that shapes need is missing, or its value has another type.",
        "The framework has no default for it, or refuses it too.",
        "Write the argument with the value that the run uses.",
        "--hidden-size 4k      # wrong",
    ),
    "MP917": CodeInfo(
        "the launch file does not state the number of GPUs",
        "No torchrun line or --gpus states the world size, so the smallest that the degrees allow is assumed.",
        "Optimizer state is sharded over the data ranks: more of them make it smaller.",
        "Give --gpus, or import a file with its torchrun line.",
        "megaplan import megatron launch.sh --gpus 64",
    ),
    "MP918": CodeInfo(
        "a variable of the launch script is set nowhere",
        "An argument that the spec needs takes its value from a variable that neither the script nor --env sets.",
        "The value is not known.",
        "Give the variable with --env, or the script's own arguments after --.",
        "megaplan import megatron launch.sh --env TP=8",
    ),
    "MP919": CodeInfo(
        "something of the launch was assumed or left out",
        "The script sources a file or asks something of the machine, or the vocabulary is that of the tokenizer's name.",
        "The spec follows from what the file itself says.",
        "Check what the note says; --set, --env and arguments after -- change it.",
        "megaplan import megatron launch.sh --set model.vocab_size=128256",
    ),
    "MP920": CodeInfo(
        "the host cannot express this",
        "The exported file omits this key of the plan, or has the host's nearest value.",
        "A run launched from it differs from the plan in this key.",
        "Change the plan, launch it another way, or accept the difference; --strict refuses it.",
        "megaplan export plan.json --to nanotron --strict",
    ),
    "MP921": CodeInfo(
        "no model of the host has these blocks",
        "The host's configuration selects one of its own models, and none has the plan's layers.",
        "No configuration of the host describes this model.",
        "Export to a host that supports hybrid models, or to one where the model is your own code.",
        "megaplan export plan.json --to maxtext      # wrong for a model with Mamba layers",
    ),
}
