"""The estimate of a published model on what a launch or configuration of another program states."""

import re
import shlex
from collections.abc import Iterator, Mapping
from math import prod

from megaplan.importers.variables import replaced, variables

_MODELS = (
    *("model", "model_name", "model_name_or_path", "pretrained_model_name_or_path", "base_model"),
    *("hf_checkpoint", "pretrain", "path", "load"),
)
"""Keys that name a model with its owner, the most specific first."""
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
    "train_micro_batch_size": "batch.micro_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "per_device_train_batch_size": "batch.micro_batch_size",
}
_TUNED_BY = ("train_type", "tuner_type", "sft_type", "finetuning_type", "adapter", "tuner_backend")
"""Arguments by which front ends choose between all parameters and low-rank adapters."""
_OF_ROLLOUTS = ("max_prompt_length", "max_response_length")
"""Lengths of verl that sum to a sequence's length."""
_PROCESSES = (
    *("actor_num_gpus_per_node", "num_npus", "num_gpus_per_node", "NPROC_PER_NODE", "nproc_per_node"),
    *("n_gpus_per_node", "gpus_per_node", "GPUS_PER_NODE", "devices"),
)
_AXES = "tensor_model", "pipeline_model", "context"
_CHECKPOINTS = "gradient_checkpointing", "enable_gradient_checkpointing", "fsdp_activation_checkpointing"
_WITHOUT_ROLLOUTS = "dpo", "kto", "rm", "orpo", "simpo", "cpo"
"""Trainings on pairs of answers, or of scores."""
_NOT_CARRIED = (
    *("fp8_recipe", "fp8_format", "fp8_param_gather", "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout", "mtp_num_layers"),
    *("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "freeze_llm", "freeze_parameters_ratio"),
)
"""Arguments that decide memory, and that an estimate of a config under host megarun has no option for."""
_SIZES = {
    "train_global_batch_size": "--global-batch",
    "global_batch_size": "--global-batch",
    "ppo_mini_batch_size": "--global-batch",
    "train_batch_size": "--global-batch",
    "max_total_sequence_length": "--seq",
    "max_length": "--seq",
    "cutoff_len": "--seq",
    "sequence_len": "--seq",
    "sequence_length": "--seq",
    "seq_length": "--seq",
    "seq_len": "--seq",
}


def _stated(text: str) -> dict[str, str]:
    """Values by name of a launch or configuration, with variables replaced; of several commands, the first."""
    plain = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    plain = replaced(plain, variables(plain))
    found = re.findall(r"(--)?([A-Za-z][\w-]*)[\"']?[ =:]+[\"']?((?!--)[\w./-]+)", plain)
    options = [(key, value) for dashes, key, value in found if dashes]  # before words of its texts
    dotted = [(key.rpartition(".")[2], value) for key, value in re.findall(r"([\w.]+)=[\"']?([\w./-]+)", plain) if "." in key]
    words = [(key, value) for _, key, value in found]
    return {key.replace("-", "_"): value for key, value in (*reversed(words), *reversed(options))} | dict(reversed(dotted))


def command(text: str) -> str:
    """The estimate of the text's model on the degrees that it states."""
    given = _stated(text)
    model = next((given[key] for key in _MODELS if "/" in given.get(key, "")), "MODEL")
    gpus = _gpus(given)
    words = ["megaplan", "estimate", model, "--gpus", str(gpus), *_lengths(given)]
    sizes = {ours: given[key] for key, ours in reversed(_OURS.items()) if given.get(key, "").isdigit()}
    for ours in dict.fromkeys(_OURS.values()):
        words += ["--set", f"{ours}={sizes[ours]}"] if ours in sizes else []
    if "--global-batch" not in words and (rows := _rows(given, gpus)):
        words += ["--global-batch", str(rows)]
    for setting in (*_state(given), *(f"lora.{key}={value}" for key, value in _adapters(given).items())):
        words += ["--set", setting]
    return shlex.join(words)


def _gpus(given: Mapping[str, str]) -> int:
    """The number of GPUs that a text states; 8 if it states none."""
    if given.get("num_processes", "").isdigit():  # Accelerate's of all nodes
        return int(given["num_processes"])
    processes = next((given[key] for key in _PROCESSES if key in given), "8")
    nodes = next((given[key] for key in ("actor_num_nodes", "NNODES", "nnodes", "num_nodes") if key in given), "1")
    return int(processes) * int(nodes) if processes.isdigit() and nodes.isdigit() else 8


def _lengths(given: Mapping[str, str]) -> list[str]:
    """Options of the sequence length and of the global batch."""
    lengths = [given.get(key, "") for key in _OF_ROLLOUTS]
    words = ["--seq", str(sum(map(int, lengths)))] if all(length.isdigit() for length in lengths) else []
    for key, option in _SIZES.items():
        if given.get(key, "").isdigit() and option not in words:
            words += [option, given[key]]
    return words


def _rows(given: Mapping[str, str], gpus: int) -> int:
    """Sequences of a step of a front end that states those of a device and how many are accumulated; 0 if it states none."""
    each = next((given[key] for key in ("per_device_train_batch_size", "micro_batch_size") if given.get(key, "").isdigit()), "0")
    steps = given.get("gradient_accumulation_steps", "")
    others = prod(int(given.get(f"{axis}_parallel_size", "1")) for axis in _AXES if given.get(f"{axis}_parallel_size", "1").isdigit())
    return int(each) * int(steps) * max(1, gpus // max(1, others)) if steps.isdigit() else 0


def _state(given: Mapping[str, str]) -> Iterator[str]:
    """Settings of the optimizer, of recompute and of experts' capacity."""
    if "muon" in given.get("optimizer", "").lower():
        yield "optimizer.matrix=muon"
    if _is_on(given.get("optimizer_cpu_offload")):
        yield f"host.optimizer_offload={given.get('optimizer_offload_fraction', '1.0')}"
    granularity = given.get("recompute_granularity")
    if granularity == "full" or (granularity is None and any(_is_on(given.get(key)) for key in _CHECKPOINTS)):
        yield "recompute.default=full"
    if _is_number(capacity := given.get("moe_expert_capacity_factor", "")):
        yield f"model.moe.capacity_factor={capacity}"


def left_out(text: str, *, loops: bool) -> str:
    """The settings that a text states and the command lacks, as one phrase; empty if there are none.

    Args:
        text: A launch or configuration of a front end.
        loops: True for a program that trains on what an engine generates.
    """
    given = _stated(text)
    kind = given.get("rlhf_type", "")
    found = ["rollouts and further models"] if loops else []
    if kind or given.get("teacher_model"):
        models = [given[key] for key in ("teacher_model", "ref_model", "reward_model") if "/" in given.get(key, "")]
        known = kind in _WITHOUT_ROLLOUTS
        others = [*(models or ["its other models"]), *(["pairs of answers"] if known else ["rollouts"])]
        found.append(f"what {kind or 'distillation'} has besides them ({', '.join(others)})")
    found += [f"--{key} {given[key]}" for key in _NOT_CARRIED if given.get(key, "false").lower() not in ("false", "none", "null")]
    return ", ".join(found)


def _is_on(value: str | None) -> bool:
    return (value or "").lower() == "true"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(?:\.\d+)?", text) is not None


def _adapters(given: Mapping[str, str]) -> dict[str, str]:
    """The section `lora` of a text that trains low-rank adapters alone; ms-swift and LLaMA-Factory have rank 8 by default."""
    named = any(given.get(key, "").lower() in ("lora", "qlora", "dora") for key in _TUNED_BY)
    rank = given.get("lora_rank", "8" if named else "0")
    if not rank.isdigit() or not int(rank):
        return {}
    alpha = given.get("lora_alpha", "")
    return {"rank": rank, "alpha": alpha if alpha.isdigit() else str(2 * int(rank))}
