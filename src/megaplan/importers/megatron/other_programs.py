"""Launches of Megatron and its forks that do something else than a spec of host megatron says, refused by name."""

import re
from types import MappingProxyType

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.hosts.megatron.argument import flag
from megaplan.importers.megatron.arguments import Arguments
from megaplan.importers.megatron.mindspeed import INDEXER, foreign_modules
from megaplan.importers.megatron.model_commands import command

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
_WITH_ENCODERS = re.compile(r"vlm|multimodal|mimo|flamingo|llava|omni|vl\.py")
_OF_IMAGES = ("patch_size", "disable_vision_class_token", "vision_model_type", "vision_pretraining", "use_tiling", "max_num_tiles")
"""Arguments that only a model with images has, whatever its program is called."""
_OF_OTHERS = {
    "a model of diffusion": ("crossattn_emb_size", "patch_spatial", "patch_temporal", "num_joint_layers", "num_single_layers"),
    "BERT": ("bert_no_binary_head",),
}
"""Arguments that only models that are not decoders of text have."""
_DECODERS_TOKENS = ("decoder_seq_length", "dataloader_seq_length")
"""Arguments with the tokens of a decoder after encoders, whose own tokens are `--seq-length`."""
_FREEZES = re.compile(r"freeze_(?:lm|llm|language_model|model|all_layers|base_for_mtp)$")
_BEYOND_SFT = re.compile(r"dpo|orm|prm|simpo|ppo|grpo|kto")
_BY_CONFIG = MappingProxyType({"use_bridge": "bridge_hf_model"})
"""Switches of forks with which a config makes the model, whatever sizes a launch states, and the argument that names the config."""


def refuse_other_program(launch: Arguments) -> None:
    """Refuses a launch whose program does not train a decoder of text or has its own modules; warns of encoders, which are not counted.

    Raises:
        MegaplanError: MP926.
    """
    _refuse_configs(launch)
    _refuse_frozen(launch)
    _refuse_stage(launch)
    _refuse_schedules(launch)
    _refuse_parts(launch)
    modules = foreign_modules(launch.values.get("spec"))
    if modules.startswith("mindspeed"):  # MindSpeed's arguments state the model, like those of Megatron-LM
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
        detail = f"{launch.name} {starts}, but a spec describes the training of a decoder of text"
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
        launch.cannot(key, "the decoder is frozen, but host megatron plans training of all of it", None, ignored)


def _refuse_stage(launch: Arguments) -> None:
    """Refuses a stage of post-training that has more than the decoder, by MindSpeed's `--stage`."""
    if _BEYOND_SFT.search(str(launch.values.get("stage"))):
        launch.pass_over("stage")
        why = "further models, pairs of answers or a head of rewards are not priced"
        launch.cannot("stage", why, None, "--ignore stage   # to plan the decoder on sequences alone")


_SCHEDULES = ("schedules_method", "schedule_method", "pipeline_schedule_algorithm", "pp_algorithm")
"""Arguments of forks that name a schedule: MindSpeed's, its port to Hygon's devices, and Primus's."""
_USUAL = ("vanilla", "auto", "1f1b", "1f1b-interleaved", "none")
_OTHER_RUNS = MappingProxyType(
    {
        "use_dualpipev": "DualPipeV in the place of 1F1B: every rank holds two chunks of the model, and other microbatches are kept",
        "enable_zero_bubble": "a schedule without bubbles in the place of 1F1B: other microbatches are kept",
        "zero_bubble_v_schedule": "a V in the place of 1F1B: every rank holds two chunks of the model",
        "enable_zbh1_pipeline": "ZB-H1 in the place of 1F1B: gradients of weights wait",
        "enable_hetero": "groups of devices, each with its own mesh",
    }
)
"""Switches of forks that change how stages run compared with Megatron-LM's schedules, with their effects."""
_OF_PRIMUS = MappingProxyType({"pp_algorithm": "patch_primus_pipeline", "enable_zero_bubble": "patch_zero_bubble"})
"""Arguments of Primus's modules, with the argument that must be on for an effect."""


def _refuse_schedules(launch: Arguments) -> None:
    """Refuses a schedule of a fork, or meshes that differ between stages; without pipeline ranks there is no schedule.

    Sources: `megatron/training/arguments.py` of sail-sg/zero-bubble-pipeline-parallelism, `examples_deepspeed/zero_bubble_pp` of
    Megatron-DeepSpeed, `flagscale/train` of FlagOpen/FlagScale, `primus/configs/modules/megatron` of AMD-AGI/Primus.
    """
    values = launch.values
    for key in (*_OTHER_RUNS, *_SCHEDULES):
        given, under = values.get(key), _OF_PRIMUS.get(key)
        launch.pass_over(key)
        if given in (None, False, *_USUAL) or (under in values and not values[under]) or (key == "pp_algorithm" and under not in values):
            continue
        if key != "enable_hetero" and values.get("pipeline_model_parallel_size") in (None, 1):
            continue
        ignored = f"--ignore {key.replace('_', '-')}   # to plan {'one mesh' if key == 'enable_hetero' else 'it under 1F1B'}"
        launch.cannot(key, _OTHER_RUNS.get(key, "another schedule than 1F1B: other microbatches are kept"), None, ignored)


_PARTS = MappingProxyType(
    {
        INDEXER: "scores of all keys are not priced; the kernels of --use-fused-lightning-indexer and --use-sparse-flash-attn are",
        "kv_compress": "attention to compressed keys is not priced",
        **dict.fromkeys(("enable_mhc", "enable_hyper_connections"), "several residual streams are not priced"),
        "share_kvstates": "layers that share keys and values are not priced",
        "post_norm": "norms on the outputs of blocks are not priced under host megatron; megarun has model.norm_placement",
        "tp_2d": "tensor parallelism in two dimensions is not priced",
        "kd": "a teacher model in memory is not priced",
    }
)
"""Switches of MindSpeed, Megatron-Bridge and Megatron-DeepSpeed whose tensors have no price."""


def _refuse_parts(launch: Arguments) -> None:
    """Refuses launches of forks with switches for features that are not priced."""
    for key, why in _PARTS.items():
        if launch.values.get(key):
            launch.pass_over(key)
            launch.cannot(key, why)


def _refuse_configs(launch: Arguments) -> None:
    """Refuses a launch whose model is built from a config, whatever sizes it states.

    Raises:
        MegaplanError: MP926.
    """
    for switch, key in _BY_CONFIG.items():
        if launch.values.get(switch):
            said = f"{launch.name} builds the model of {flag(key)} by {flag(switch)}, and not of the sizes that it states"
            stated = "\n".join(f"{name}={value}" for name, value in {**launch.values, "model": launch.values.get(key)}.items())
            raise MegaplanError([diagnostic("MP926", said, launch.at(switch), (command(stated),))])
