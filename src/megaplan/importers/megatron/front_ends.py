"""Other front ends of Megatron: programs with their own arguments, whose model is in another file."""

import re
import shlex
from typing import NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.importers.megatron.arguments import Arguments
from megaplan.importers.megatron.model_commands import command, left_out
from megaplan.importers.variables import replaced, variables


class _FrontEnd(NamedTuple):
    """A program that starts Megatron from arguments or its own file: its name, its mark in a text, and the source of its model."""

    name: str
    mark: re.Pattern[str]
    model: str


_WHOLE = re.MULTILINE | re.DOTALL
_OWN_COMMANDS = {
    "torchtitan": "megaplan import torchtitan {}",
    "MaxText": "megaplan import maxtext {}",
    "transformers": "megaplan import hf {}",
}
"""Commands that read the files of a front end directly."""
_ARGUMENTS = "its arguments"
"""Source text for a model that Megatron's own arguments state, which are read if present."""
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
    _FrontEnd(
        "MindSpeed-RL", re.compile(r"^megatron_training:.*?^(?:actor_config|rl_config):", _WHOLE), "the file of megatron_training.model"
    ),
    _FrontEnd("NeMo 1", re.compile(r"^(?:trainer|exp_manager):.*?^model:", re.MULTILINE | re.DOTALL), "the section model"),
    _FrontEnd(
        "NeMo-RL",
        re.compile(r"\A(?=.*^(?:policy|grpo|sft|dpo|distillation):)(?=.*^\s+(?:megatron_cfg|dtensor_cfg):)", _WHOLE),
        "the config of policy.model_name",
    ),
    _FrontEnd("ChatLearn", re.compile(r"^[^#\n]*\bchatlearn/entrypoint\.py\b", re.MULTILINE), "the config of models.policy_trainer.load"),
    _FrontEnd(
        "ROLL",
        re.compile(r"\A(?=.*^(?:pretrain|actor_train):).*?^\s+strategy_name: *[\"']?(?:megatron|deepspeed|fsdp)", _WHOLE),
        "the config of pretrain",
    ),
    _FrontEnd(
        "AReaL",
        re.compile(r"\A(?=.*^(?:actor|allocation_mode):).*?^\s+(?:backend: *[\"']?(?:megatron|fsdp|archon)|n_gpus_per_node):", _WHOLE),
        "the config of actor.path",
    ),
    _FrontEnd(
        "Hetu-Galvatron",
        re.compile(r"^\s+(?:galvatron_config_path|default_dp_type):", re.MULTILINE),
        "the YAML of model_config_path",
    ),
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
        "a Megatron-Bridge recipe",
        re.compile(r"\bmegatron\.bridge\.recipes\b|^[^#\n]*\brun_recipe\.py\b", re.MULTILINE),
        "the recipe, whose run writes run_config.yaml",
    ),
    _FrontEnd(
        "NeMo 2",
        re.compile(r"^[^#\n]*(?:_target_: *nemo\.|\bnemo\.collections\.llm\b|\bnemo_run\b|\bnemo llm\b)", re.MULTILINE),
        "its recipe",
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
_LOOPS = ("slime", "verl", "OpenRLHF", "MindSpeed-RL", "NeMo-RL", "ChatLearn", "ROLL", "AReaL")
"""Front ends that train on what an engine generates."""
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

_RECIPE = re.compile(r"(?:--recipe[ =]+|_target_: *megatron\.bridge\.recipes\.)[\"']?([\w.$\{\}-]+)")
"""A recipe of Megatron-Bridge that a launch or an override names."""
_BRIDGE = re.compile(r"^_target_: *megatron\.bridge\.", re.MULTILINE)
_STATES_MODEL = re.compile(
    r"\A(?=.*^\W*num[-_]layers\W*:)(?=.*^\W*hidden[-_]size\W*:)"
    r"(?=.*^\W*(?:encoder_seq_length|pipe[-_]parallel[-_]size|train_micro_batch_size_per_gpu)\W*:)",
    _WHOLE,
)
"""YAML of gpt-neox and of NeMo 1 with the model's sizes, which `other_yaml` reads."""
_STARTS_MEGATRON = re.compile(r"^[^#\n]*\bpretrain_(?:gpt|mamba|hybrid)\.py\b", re.MULTILINE)


def refuse_file(text: str, name: str) -> None:
    """Refuses a file of another program that is given as a spec, a plan or a config.

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
    if given.get("use_dynamic_batch_size") and isinstance(tokens, int):  # the rows of a microbatch are packed up to this length
        own["seq_length"] = own["max_position_embeddings"] = tokens * (launch.optional("context_parallel_size") or 1)
    counts = [given.get(key, 1) for key in ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout")]
    rows, samples, updates = (count if isinstance(count, int) else 0 for count in counts)
    if "rollout_batch_size" in given and rows * samples * updates > 0:
        own["global_batch_size"] = rows * samples // updates
    if launch.environment.get("OPEN_TRAINING_INT4_FAKE_QAT_FLAG") in ("1", "true"):
        launch.guess(
            "", "weights of experts in 4 bits while training (OPEN_TRAINING_INT4_FAKE_QAT_FLAG): their rounded copies are not counted"
        )
    absent = {key: value for key, value in own.items() if given.get(key) is None and not (key == "bf16" and given.get("fp16"))}
    launch.values |= absent
    launch.say("slime's defaults for arguments that the launch lacks: " + ", ".join(f"{key} = {value}" for key, value in absent.items()))
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
            said = f"{name} is a Python program, whose settings are known only when it runs"
            raise MegaplanError([diagnostic("MP926", said, Location(name), _OF_A_RUN)])
        return
    front, match = found
    line = text.count("\n", 0, match.start()) + 1 + match[0][: match[0].rfind("\n") + 1].count("\n")
    if front.name in _OWN_COMMANDS:
        raise MegaplanError(
            [diagnostic("MP926", f"{name} is of {front.name}", Location(name), (_OWN_COMMANDS[front.name].format(shlex.quote(name)),))]
        )
    detail = f"{name} belongs to {front.name}, which takes the model from {_source_of(front, text)}"
    stated_here = _of_policy(text) if front.name == "NeMo-RL" else text
    if lacks := left_out(stated_here, loops=front.name in _LOOPS):
        detail += f"\nits first command plans the training steps of the model alone, without {lacks}"
    hints = (
        *(_of_primus(text) or (command(stated_here),)),
        *(_OF_A_RUN if python else _OF_A_RUN[1:] if "run_config" in front.model else ()),
        *(("megaplan import megatron TRAINING.log   # if the log has Megatron's table of arguments",) if front.name in _WITH_TABLE else ()),
    )
    raise MegaplanError([diagnostic("MP926", detail, Location(name, line), hints)])


def _source_of(front: _FrontEnd, text: str) -> str:
    """The source of a front end's model, with the name of the recipe that the text has."""
    named = _RECIPE.search(replaced(text, variables(text))) if "recipe" in front.model else None
    return front.model if named is None else front.model.replace("the recipe", f"the recipe {named[1]}")


def _of_primus(text: str) -> tuple[str, ...]:
    """The import of the configuration that a launch of Primus names; empty for other texts."""
    named = re.search(r"^[^#\n]*(?:\bEXP=[\"']?|\bprimus-cli\b[^#\n]*--config[= ]+)([\w./${}-]+\.ya?ml)", text, re.MULTILINE)
    return (f"megaplan import megatron {named[1]}   # and the launch's own arguments, after --",) if named else ()


def _of_policy(text: str) -> str:
    """The sections of a configuration of NeMo-RL that state the model that is trained and the cluster."""
    return "".join(re.findall(r"^(?:policy|cluster):.*?(?=^\S|\Z)", text, _WHOLE))


def _is_python(text: str, name: str) -> bool:
    """True if a text is a program in Python: by its suffix, by the program of its first line, or by its first line of code."""
    if name.endswith((".py", ".pyi")) or re.match(r"#!\S*(?:/env +)?\S*python", text):
        return True
    first = next((line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    return _PYTHON.match(first) is not None
