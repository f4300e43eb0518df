"""Other front ends of Megatron: programs with arguments of their own, whose model is in another file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.hosts.megatron.argument import flag
from megaplan.importers.megatron.arguments import Arguments
from megaplan.importers.megatron.meant import foreign_modules
from megaplan.importers.variables import replaced, variables


class _FrontEnd(NamedTuple):
    """A program that starts Megatron from arguments or a file of its own: its name, its mark in a text, and the source of its model."""

    name: str
    mark: re.Pattern[str]
    model: str


_WHOLE = re.MULTILINE | re.DOTALL
_OWN_COMMANDS = {
    "torchtitan": "megaplan import torchtitan {}",
    "MaxText": "megaplan import maxtext {}",
    "transformers": "megaplan import hf {}",
}
"""Commands that read the files of a front end as they are."""
_ARGUMENTS = "its arguments"
"""Source of a model that Megatron's own arguments state, which are read where a text has them."""
_SOURCES = "the model's script of Megatron arguments"
"""Source of a model in a file of Megatron's arguments that the launch sources."""
_FRONT_ENDS = (
    _FrontEnd(
        "ms-swift", re.compile(r"^[^#\n]*\b(?:megatron|swift)\s+(?:sft|pt|rlhf|grpo|export)\b", re.MULTILINE), "the config of --model"
    ),
    _FrontEnd(
        "slime",
        re.compile(r"--(?:actor-num-gpus-per-node|rollout-num-gpus)\b|slime/train\w*\.py"),
        _SOURCES,
    ),
    _FrontEnd("verl", re.compile(r"\bverl\.trainer\b|actor_rollout_ref\."), "the config of actor_rollout_ref.model.path"),
    _FrontEnd("OpenRLHF", re.compile(r"\bopenrlhf\.cli\b"), "the config of --pretrain"),
    _FrontEnd("LLaMA-Factory", re.compile(r"^[^#\n]*\bllamafactory-cli\s+train\b", re.MULTILINE), "the config of model_name_or_path"),
    _FrontEnd("MindSpeed FSDP2", re.compile(r"^[^#\n]*\btrain_fsdp2\.py\b", re.MULTILINE), "the config of --model.model_name_or_path"),
    _FrontEnd(
        "MindSpeed",
        re.compile(r"\bmindspeed(?:_llm|_rl|_mm)?\b|--use-fused-(?:rmsnorm|swiglu|rotary-pos-emb)\b|\bASCEND_"),
        _ARGUMENTS,
    ),
    _FrontEnd("NeMo 1", re.compile(r"^(?:trainer|exp_manager):.*?^model:", re.MULTILINE | re.DOTALL), "the section model"),
    _FrontEnd("NeMo Automodel", re.compile(r"\bnemo_automodel\b"), "model.pretrained_model_name_or_path"),
    _FrontEnd(
        "Accelerate",
        re.compile(
            r"\A(?=.*^(?:distributed_type|compute_environment|deepspeed_config|fsdp_config):)(?=.*^(?:num_processes|mixed_precision):)",
            _WHOLE,
        ),
        "the program that it starts",
    ),
    _FrontEnd(
        "NeMo 2",
        re.compile(r"^[^#\n]*(?:_target_: *nemo\.|\bnemo\.collections\.llm\b|\bnemo_run\b|\bnemo llm\b)", re.MULTILINE),
        "its recipe",
    ),
    _FrontEnd(
        "a Megatron-Bridge recipe",
        re.compile(r"\bmegatron\.bridge\.recipes\b|^[^#\n]*\brun_recipe\.py\b", re.MULTILINE),
        "the recipe, whose run writes run_config.yaml",
    ),
    _FrontEnd("Primus", re.compile(r"^[^#\n]*(?:\bprimus-cli\b|\bEXP=\S+\.ya?ml)", re.MULTILINE), "the YAML of --config"),
    _FrontEnd("LLaMA-Factory", re.compile(r"\A(?=.*^model_name_or_path:)(?=.*^(?:finetuning_type|stage):)", _WHOLE), "model_name_or_path"),
    _FrontEnd(
        "axolotl", re.compile(r"\A(?=.*^base_model:)(?=.*^sequence_len:)|^[^#\n]*\baxolotl (?:train|preprocess)\b", _WHOLE), "base_model"
    ),
    _FrontEnd("torchtune", re.compile(r"_component_: *torchtune\.|^[^#\n]*\btune run\b", re.MULTILINE), "the builder of its section model"),
    _FrontEnd("nanotron", re.compile(r"\A(?=.*^parallelism:)(?=.*^\s+model_config:)", _WHOLE), "model.model_config"),
    _FrontEnd(
        "DeepSpeed",
        re.compile(r"\A\s*\{(?=.*\"(?:zero_optimization|train_micro_batch_size_per_gpu)\")", _WHOLE),
        "the program that reads it",
    ),
    _FrontEnd("torchtitan", re.compile(r"\A(?=.*^\[model\])(?=.*^\[(?:training|parallelism)\])", _WHOLE), "torchtitan's registry"),
    _FrontEnd(
        "MaxText", re.compile(r"^[^#\n]*(?:\bpython3? +(?:-m +)?\S*\b(?:maxtext|MaxText)[./]|^base_emb_dim:)", re.MULTILINE), "model_name"
    ),
    _FrontEnd("transformers", re.compile(r"\A\s*\{(?=.*\"model_type\")(?!.*\"MODEL_ARGS\")", _WHOLE), "the file itself"),
)
_WITH_TABLE = ("ms-swift", "slime", "MindSpeed")
"""Front ends whose runs print the table of Megatron's parser."""
_OF_A_RUN = (
    "megaplan import megatron LAUNCH.sh         # the script that starts it, if that has Megatron's arguments",
    "megaplan import megatron run_config.yaml   # the configuration that a run of Megatron-Bridge writes",
)
_PYTHON = re.compile(
    r"import [A-Za-z_][\w.]*(?: as \w+)?(?:, *\w|$)|from [\w.]+ import\b|def \w+\(|class \w+[(:]|@\w+[\w.]*(?:\(|$)|\"\"\"|'''"
)
"""The first line of a Python source after its comments."""
_OURS = {
    "tensor_model_parallel_size": "mesh.tp",
    "pipeline_model_parallel_size": "mesh.pp",
    "context_parallel_size": "mesh.cp",
    "expert_model_parallel_size": "mesh.ep",
    "expert_tensor_parallel_size": "mesh.etp",
    "tp_size": "mesh.tp",
    "pp_size": "mesh.pp",
    "cp_size": "mesh.cp",
    "ep_size": "mesh.ep",
    "micro_batch_size": "batch.micro_batch_size",
    "local_batch_size": "batch.micro_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
}
_TUNED_BY = ("train_type", "tuner_type", "sft_type", "finetuning_type", "adapter", "tuner_backend")
"""Arguments by which front ends choose between all parameters and low-rank adapters."""
_OF_ROLLOUTS = ("max_prompt_length", "max_response_length")
"""Lengths of verl whose sum is that of a sequence."""
_SIZES = {
    "global_batch_size": "--global-batch",
    "ppo_mini_batch_size": "--global-batch",
    "train_batch_size": "--global-batch",
    "max_length": "--seq",
    "cutoff_len": "--seq",
    "sequence_len": "--seq",
    "seq_length": "--seq",
    "seq_len": "--seq",
}


_OTHER_PROGRAMS = {
    r"bert": "BERT",
    r"t5\b": "T5",
    r"rwkv": "RWKV",
    r"retro": "RETRO",
    r"\bict\b|pretrain_ict|biencoder|retriever|orqa|realm": "a retriever",
    r"vision_|dino|pretrain_swin": "a model of images",
    r"generat|inference|server": "inference",
    r"convert|checkpoint_util|checkpoint/": "the conversion of a checkpoint",
    r"preprocess|merge_datasets|build_index|analyze_data|prepare_\w*data|blend\w*_dataset": "the preparation of data",
    r"tasks/|evaluat|finetune_race|msdp|lm_eval": "a task of evaluation",
    r"quantize|export|prune": "the export of a checkpoint",
}
"""Parts of the names of programs in Megatron's tree that train no decoder of text."""
_BRIDGE = re.compile(r"^_target_: *megatron\.bridge\.", re.MULTILINE)
_STATES_MODEL = re.compile(
    r"\A(?=.*^\W*num[-_]layers\W*:)(?=.*^\W*hidden[-_]size\W*:)"
    r"(?=.*^\W*(?:encoder_seq_length|pipe[-_]parallel[-_]size|train_micro_batch_size_per_gpu)\W*:)",
    _WHOLE,
)
"""YAML of gpt-neox and of NeMo 1 with the model's sizes, which `other_yaml` reads."""
_STARTS_MEGATRON = re.compile(r"^[^#\n]*\bpretrain_(?:gpt|mamba|hybrid)\.py\b", re.MULTILINE)
_WITH_ENCODERS = re.compile(r"vlm|multimodal|mimo|flamingo|llava|omni|vl\.py")
_OF_IMAGES = ("patch_size", "disable_vision_class_token", "vision_model_type", "vision_pretraining", "use_tiling", "max_num_tiles")
"""Arguments that only a model with images has, whatever its program is called."""
_OF_OTHERS = {
    "a model of diffusion": ("crossattn_emb_size", "patch_spatial", "patch_temporal", "num_joint_layers", "num_single_layers"),
    "BERT": ("bert_no_binary_head",),
}
"""Arguments that only models have that are not decoders of text."""
_DECODERS_TOKENS = ("decoder_seq_length", "dataloader_seq_length")
"""Arguments with the tokens of a decoder behind encoders, whose own tokens are `--seq-length`."""
_FREEZES = re.compile(r"freeze_(?:lm|llm|language_model|model|all_layers|base_for_mtp)$")
_BEYOND_SFT = re.compile(r"dpo|orm|prm|simpo|ppo|grpo|kto")
_BY_CONFIG = MappingProxyType({"use_bridge": "bridge_hf_model"})
"""Switches of forks with which a config makes the model, whatever sizes a launch states, and the argument that names the config."""


def refuse_other_program(launch: Arguments) -> None:
    """Refuses a launch of a program that trains no decoder of text; of modules of one's own; warns of encoders that are not counted.

    Raises:
        MegaplanError: MP926.
    """
    _refuse_configs(launch)
    _refuse_frozen(launch)
    _refuse_stage(launch)
    modules = foreign_modules(launch.values.get("spec"))
    if modules.startswith("mindspeed"):  # whose arguments state the model, as Megatron-LM's do
        launch.guess("spec", f"--spec {modules} builds the layers; they are planned as those of Megatron-LM")
    elif modules:
        launch.cannot("spec", f"{modules.split()[0].partition('.')[0]} has the code that builds the layers", None, "--ignore spec")
    program = "/".join(launch.program.lower().split("/")[-2:])
    if re.search(r"(?:pretrain|train)_(?:gpt|mamba|hybrid)\w*\.py$", program):
        return
    what = next((what for part, what in _OTHER_PROGRAMS.items() if re.search(part, program)), None)
    foreign = next(
        (f"has {flag(key)}, {kind}" for kind, keys in _OF_OTHERS.items() for key in keys if launch.values.get(key) not in (None, False)), ""
    )
    if foreign or what is not None:
        starts = foreign or f"starts {launch.program.rpartition('/')[2]}, {what}"
        detail = f"{launch.name} {starts}, and a spec is of the training of a decoder of text"
        raise MegaplanError([diagnostic("MP926", detail, Location(launch.name), ("megaplan import megatron TRAINING.sh",))])
    of_images = next((key for key in _OF_IMAGES if launch.values.get(key)), "")
    if of_images or _WITH_ENCODERS.search(program):
        said = f"{program.rpartition('/')[2] or launch.name} builds encoders in front of the decoder, which are not counted"
        launch.guess(of_images, said)
        _take_decoders_tokens(launch)


def _take_decoders_tokens(launch: Arguments) -> None:
    """Gives a launch with encoders in front the length of its decoder's sequences.

    Source: `examples/multimodal/model.py` of NVIDIA/Megatron-LM sets `--seq-length` to the tokens of the images.
    """
    key = next((key for key in _DECODERS_TOKENS if isinstance(launch.values.get(key), int)), None)
    if key is not None:
        launch.note("seq_length", f"{flag('seq_length')} is of the encoder, and {flag(key)} {launch.values[key]} is planned")
        launch.values["seq_length"] = launch.values[key]


def _refuse_frozen(launch: Arguments) -> None:
    """Refuses a launch whose decoder is frozen: without gradients and optimizer state its memory is another."""
    key = next((key for key, value in launch.values.items() if value is True and _FREEZES.match(key.lower())), None)
    if key is not None:
        launch.pass_over(key)
        ignored = f"--ignore {key.replace('_', '-')}   # to plan it as trained"
        launch.cannot(key, "the decoder is frozen, and host megatron trains all of it", None, ignored)


def _refuse_stage(launch: Arguments) -> None:
    """Refuses a stage of post-training that has more than the decoder, by MindSpeed's `--stage`."""
    if _BEYOND_SFT.search(str(launch.values.get("stage"))):
        launch.pass_over("stage")
        why = "further models, pairs of answers or a head of rewards are not priced"
        launch.cannot("stage", why, None, "--ignore stage   # to plan the decoder on sequences alone")


def _refuse_configs(launch: Arguments) -> None:
    """Refuses a launch whose model is built from a config, whatever sizes it states.

    Raises:
        MegaplanError: MP926.
    """
    for switch, key in _BY_CONFIG.items():
        if launch.values.get(switch):
            said = f"{launch.name} builds the model of {flag(key)} by {flag(switch)}, and not of the sizes that it states"
            stated = "\n".join(f"{name}={value}" for name, value in {**launch.values, "model": launch.values.get(key)}.items())
            raise MegaplanError([diagnostic("MP926", said, launch.at(switch), (_command(stated),))])


def refuse_file(text: str, name: str) -> None:
    """Refuses a file of another program where a spec, a plan or a config is read.

    Args:
        text: The text of the file.
        name: Name of the file in diagnostics.

    Raises:
        MegaplanError: MP926, with the command that reads the file, or that estimates its model.
    """
    if _BRIDGE.search(text) or _STARTS_MEGATRON.search(text) or _STATES_MODEL.search(text):
        said = f"{name} is {'a configuration of Megatron-Bridge' if _BRIDGE.search(text) else 'a launch of Megatron'}"
        raise MegaplanError([diagnostic("MP926", said, Location(name), (f"megaplan import megatron {shlex.quote(name)} -o spec.yaml",))])
    refuse_front_end(text, name)


def sources_model(text: str) -> bool:
    """True if a launch is of a front end whose model is in a file of Megatron's arguments that it sources."""
    return any(front.model == _SOURCES and front.mark.search(text) for front in _FRONT_ENDS)


_OF_SLIME = {"use_distributed_optimizer": True, "bf16": True, "seq_length": 4096, "max_position_embeddings": 4096}
"""Values that slime sets where a launch has none (`slime/backends/megatron_utils/arguments.py` of THUDM/slime)."""


def with_own_defaults(launch: Arguments) -> Arguments:
    """The launch of a front end that sources the model's arguments, with the values that it sets itself."""
    own, given = dict(_OF_SLIME), launch.values
    nodes, gpus, tokens = (given.get(key) for key in ("actor_num_nodes", "actor_num_gpus_per_node", "max_tokens_per_gpu"))
    if isinstance(nodes, int) and isinstance(gpus, int):
        own["world_size"] = nodes * gpus
    if given.get("use_dynamic_batch_size") and isinstance(tokens, int):  # rows of a microbatch are packed up to this
        own["seq_length"] = own["max_position_embeddings"] = tokens * (launch.optional("context_parallel_size") or 1)
    absent = {key: value for key, value in own.items() if given.get(key) is None and not (key == "bf16" and given.get("fp16"))}
    launch.values |= absent
    launch.say("as slime sets them where a launch does not: " + ", ".join(f"{key} = {value}" for key, value in absent.items()))
    return launch


def refuse_front_end(text: str, name: str) -> None:
    """Refuses a launch or configuration of another front end.

    Args:
        text: The text of the file.
        name: Name of the file in diagnostics.

    Raises:
        MegaplanError: MP926, with the command that estimates the model on the degrees that the text states.
    """
    stated = all(re.search(rf"^[^#\n]*--{size}\b", text, re.MULTILINE) for size in ("num-layers", "hidden-size"))
    python = _is_python(text, name)
    if _STATES_MODEL.search(text) or (stated and not python and _STARTS_MEGATRON.search(text)):
        return
    asked = (one for one in _FRONT_ENDS if not (stated and one.model == _ARGUMENTS))
    found = next(((one, match) for one in asked if (match := one.mark.search(text)) is not None), None)
    if found is None:
        if python:
            said = f"{name} is a program in Python, whose settings are known where it runs"
            raise MegaplanError([diagnostic("MP926", said, Location(name), _OF_A_RUN)])
        return
    front, match = found
    line = text.count("\n", 0, match.start()) + 1 + match[0][: match[0].rfind("\n") + 1].count("\n")
    if front.name in _OWN_COMMANDS:
        raise MegaplanError(
            [diagnostic("MP926", f"{name} is of {front.name}", Location(name), (_OWN_COMMANDS[front.name].format(shlex.quote(name)),))]
        )
    detail = f"{name} is of {front.name}, whose model comes from {front.model}"
    hints = (
        *(_of_primus(text) or (_command(text),)),
        *(_OF_A_RUN if python else _OF_A_RUN[1:] if "run_config" in front.model else ()),
        *(("megaplan import megatron TRAINING.log   # where it has Megatron's table of arguments",) if front.name in _WITH_TABLE else ()),
    )
    raise MegaplanError([diagnostic("MP926", detail, Location(name, line), hints)])


def _of_primus(text: str) -> tuple[str, ...]:
    """The import of the configuration that a launch of Primus names; empty for other texts."""
    named = re.search(r"^[^#\n]*(?:\bEXP=[\"']?|\bprimus-cli\b[^#\n]*--config[= ]+)([\w./${}-]+\.ya?ml)", text, re.MULTILINE)
    return (f"megaplan import megatron {named[1]}   # and the launch's own arguments, after --",) if named else ()


def _is_python(text: str, name: str) -> bool:
    """True if a text is a program in Python: by its suffix, by the program of its first line, or by its first line of code."""
    if name.endswith((".py", ".pyi")) or re.match(r"#!\S*(?:/env +)?\S*python", text):
        return True
    first = next((line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    return _PYTHON.match(first) is not None


def _stated(text: str) -> dict[str, str]:
    """Values by name of a launch or configuration, with its variables replaced; of several commands those of the first."""
    plain = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    plain = replaced(plain, variables(plain))
    found = re.findall(r"([A-Za-z][\w-]*)[\"']?[ =:]+[\"']?((?!--)[\w./-]+)", plain)
    dotted = [(key.rpartition(".")[2], value) for key, value in re.findall(r"([\w.]+)=[\"']?([\w./-]+)", plain) if "." in key]
    return {key.replace("-", "_"): value for key, value in reversed(found)} | dict(reversed(dotted))


def _command(text: str) -> str:
    """The estimate of the text's model on the degrees that it states."""
    given = _stated(text)
    model = next(
        (
            given[key]
            for key in (
                "model",
                "model_name_or_path",
                "pretrained_model_name_or_path",
                "base_model",
                "hf_checkpoint",
                "pretrain",
                "path",
                "load",
            )
            if "/" in given.get(key, "")
        ),
        "MODEL",
    )
    processes = next(
        (given[key] for key in ("NPROC_PER_NODE", "nproc_per_node", "n_gpus_per_node", "GPUS_PER_NODE", "devices") if key in given), "8"
    )
    nodes = next((given[key] for key in ("NNODES", "nnodes", "num_nodes") if key in given), "1")
    gpus = int(processes) * int(nodes) if processes.isdigit() and nodes.isdigit() else 8
    if given.get("num_processes", "").isdigit():  # Accelerate's of all nodes
        gpus = int(given["num_processes"])
    words = ["megaplan", "estimate", model, "--gpus", str(gpus)]
    lengths = [given.get(key, "") for key in _OF_ROLLOUTS]
    if all(length.isdigit() for length in lengths):
        words += ["--seq", str(sum(map(int, lengths)))]
    for key, option in _SIZES.items():
        if given.get(key, "").isdigit() and option not in words:
            words += [option, given[key]]
    for key, ours in _OURS.items():
        if given.get(key, "").isdigit():
            words += ["--set", f"{ours}={given[key]}"]
    for key, value in _adapters(given).items():
        words += ["--set", f"lora.{key}={value}"]
    return shlex.join(words)


def _adapters(given: Mapping[str, str]) -> dict[str, str]:
    """The section `lora` of a text that trains low-rank adapters alone; ms-swift and LLaMA-Factory have rank 8 by default."""
    named = any(given.get(key, "").lower() in ("lora", "qlora", "dora") for key in _TUNED_BY)
    rank = given.get("lora_rank", "8" if named else "0")
    if not rank.isdigit() or not int(rank):
        return {}
    alpha = given.get("lora_alpha", "")
    return {"rank": rank, "alpha": alpha if alpha.isdigit() else str(2 * int(rank))}
