"""Arguments of Megatron-DeepSpeed, and the JSON of `--deepspeed_config`, read as arguments of Megatron-LM.

Sources: `megatron/arguments.py`, `megatron/training.py`, `megatron/model` and `megatron/core/tensor_parallel/layers.py` of
deepspeedai/Megatron-DeepSpeed; `runtime/config.py`, `runtime/zero/config.py`, `runtime/engine.py`, `runtime/pipe/engine.py` and
`runtime/bf16_optimizer.py` of deepspeedai/DeepSpeed. The engine takes ZeRO's stage, its offload and the dtypes from the JSON.
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from megaplan.errors import MegaplanError
from megaplan.hosts.megatron.argument import flag
from megaplan.importers.megatron.unset import readable, unset_names
from megaplan.spec.read import file_of, read_text

CONFIG = "deepspeed_config"
OWN_MODULES = "own_modules"
"""Key of a launch's values, no argument, for the keys of `host` of a fork's modules or Megatron-LM's before Megatron-Core."""
_HOST_DEVICES = ("cpu", "nvme")
_OFFLOADS = ("cpu_optimizer", "cpu_torch_adam")
_SHARDS = "whose buffers are not DeepSpeed's"
_FLASH = MappingProxyType({"use_flash_attn": None, "use_flash_attn_v1": None, "use_flash_attn_triton": None, "use_flash_attn_v2": 2})
"""Switches of FlashAttention in a fork's own modules, and its generation if they state it."""
_SIZES = {"train_micro_batch_size_per_gpu": "micro_batch_size", "train_batch_size": "global_batch_size", "gradient_clipping": "clip_grad"}


class Translated(NamedTuple):
    """An argument of a fork that is read as others.

    Attributes:
        key: The argument.
        said: The reading, as a note.
        uncertain: True if memory can differ from the reading.
    """

    key: str
    said: str
    uncertain: bool = False


def with_config(values: Mapping[str, Any], name: str, written: Mapping[str, str]) -> dict[str, Any]:
    """The values of a launch, with the path in `--deepspeed_config` replaced by its JSON if the script writes it or the file exists.

    Args:
        values: Arguments of a launch.
        name: Name of the launch's file, next to which the JSON is looked for.
        written: Texts of the files that the script writes, by their paths.
    """
    path = values.get(CONFIG)
    if not values.get("deepspeed") or not isinstance(path, str):
        return dict(values)
    text = written.get(path)
    found = None if text is not None or unset_names(path) else file_of(path, name)
    try:
        config = json.loads(read_text(found) if found is not None else text or "")
    except (OSError, ValueError, RecursionError, MegaplanError):
        return dict(values)
    return {**values, CONFIG: config} if isinstance(config, dict) else dict(values)


def translate_deepspeed(values: dict[str, Any]) -> list[Translated]:
    """Translates arguments of Megatron-DeepSpeed: removes them from `values` and adds their equivalents."""
    found = [*_configured(values), *_own_modules(values)] if values.get("deepspeed") else []
    found += _sharded(values)
    steps = [values.pop(key, None) for key in _OFFLOADS]
    if any(steps) and not any(said.key == "optimizer_cpu_offload" for said in found):
        found.append(_offloaded(values, "--cpu-optimizer"))
    if values.get("remote_device") in _HOST_DEVICES:
        found.append(Translated("remote_device", f"--remote-device {values['remote_device']}: {_PARAMETERS}", uncertain=True))
    values.pop("remote_device", None)
    if values.get("deepspeed") and values.get("num_experts") is not None:
        found += _experts(values)
    if "embedding" in str(values.get("pp_partition_method")):
        found.append(_stages(values))
    if isinstance(ranks := values.get("ds_sequence_parallel_size"), int) and values.get("context_parallel_size") in (None, 1):
        del values["ds_sequence_parallel_size"]
        values["context_parallel_size"] = ranks
        found += [Translated("context_parallel_size", f"--ds-sequence-parallel-size {ranks} is planned as context parallelism")][
            : ranks > 1
        ]
    return found


_PARAMETERS = "parameters are in host memory there, and are counted on the device"


def flash_of_own_modules(values: dict[str, Any]) -> None:
    """FlashAttention in modules that are not Megatron-Core's, which takes it there without Transformer Engine."""
    given = [version for key, version in _FLASH.items() if values.pop(key, None)]
    if given and values["transformer_impl"] == "local":
        values[OWN_MODULES] = {"attention_backend": "flash"} | ({"flash_version": 2} if 2 in given else {})
    elif given:
        values["use_flash_attn"] = True


def _own_modules(values: dict[str, Any]) -> Iterator[Translated]:
    """Modules of Megatron-DeepSpeed: not Transformer Engine's by default, with weight gradients that no product adds up."""
    if values.get("transformer_impl") is None:
        values["transformer_impl"] = "local"
        yield Translated("transformer_impl", "--transformer-impl local is the default of Megatron-DeepSpeed")
    if values["transformer_impl"] == "local":
        values |= {"gradient_accumulation_fusion": None, "no_gradient_accumulation_fusion": True}
    flash_of_own_modules(values)


def _configured(values: dict[str, Any]) -> Iterator[Translated]:
    """Settings of the JSON, or a warning that it is not here."""
    config = values.pop(CONFIG, None)
    if config is None:
        return
    if not isinstance(config, dict):
        said = f"{flag(CONFIG)} {readable(str(config))} does not exist here or is not JSON: its ZeRO stage, offload and dtypes are not read"
        yield Translated("deepspeed", said, uncertain=True)
        return
    yield from _dtypes(values, config)
    for theirs, ours in _SIZES.items():
        size = config.get(theirs)
        if isinstance(size, bool) or not isinstance(size, int | float) or values.get(ours) == size:
            continue
        if values.get(ours) is None:
            values[ours] = size
            yield Translated(ours, f"{flag(ours)} {size}, as {theirs} of {flag(CONFIG)}")
        elif ours != "clip_grad" or size:
            yield Translated(ours, f"{theirs} = {size} in {flag(CONFIG)}, and {flag(ours)} {values[ours]} is planned", uncertain=True)
    yield from _gpus(values, config)
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    stage, stated = zero.get("stage", 0), values.get("zero_stage")
    values["zero_stage"] = stage
    if stated is not None and stated != stage:
        said = f"ZeRO's stage is {stage} in {flag(CONFIG)}, which the engine reads; --zero-stage {stated} has no effect"
        yield Translated("zero_stage", said, uncertain=True)
    if _in_host_memory(zero, "offload_optimizer") or zero.get("cpu_offload") is True:
        yield _offloaded(values, f"offload_optimizer of {flag(CONFIG)}")
    if _in_host_memory(zero, "offload_param") or zero.get("cpu_offload_params") is True:
        yield Translated("zero_stage", f"offload_param of {flag(CONFIG)}: {_PARAMETERS}", uncertain=True)


def _gpus(values: dict[str, Any], config: Mapping[str, Any]) -> Iterator[Translated]:
    """The GPUs of a launch that does not state them, by the batch sizes of the JSON, which are checked against each other."""
    whole, micro, updates = (
        config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    degrees = [values.get(f"{axis}_model_parallel_size") or 1 for axis in ("tensor", "pipeline")]
    if not all(isinstance(each, int) and each > 0 for each in (whole, micro, updates, *degrees)):
        return
    ranks, left = divmod(int(whole or 0), int(micro or 0) * int(updates or 0))
    if not left and not values.keys() & {"world_size", "nproc_per_node"}:
        values["world_size"] = ranks * prod(degrees)
        yield Translated("world_size", f"{values['world_size']} GPUs, by the batch sizes of {flag(CONFIG)}")


def _in_host_memory(zero: Mapping[str, Any], key: str) -> bool:
    part = zero.get(key)
    return isinstance(part, dict) and part.get("device") in _HOST_DEVICES


def _dtypes(values: dict[str, Any], config: Mapping[str, Any]) -> Iterator[Translated]:
    """Dtypes of parameters and gradients; the engine converts the model to the JSON's dtypes."""
    parts = {key: config.get(key) for key in ("bf16", "fp16")} | ({"bf16": config["bfloat16"]} if "bfloat16" in config else {})
    given = {key for key in parts if values.get(key)}
    stated = {key for key, part in parts.items() if isinstance(part, dict) and part.get("enabled") is True}
    if len(stated) == 1 and stated != given:
        (key,) = stated
        for other in given - stated:
            del values[other]
        values[key] = True
        yield Translated(key, f"{flag(key)}, as {flag(CONFIG)} says" + "".join(f", and not {flag(other)}" for other in given), bool(given))
    kinds = config.get("data_types")
    sums = kinds.get("grad_accum_dtype") if isinstance(kinds, dict) else None
    if sums == "bf16" and values.get("bf16"):
        values["grad_reduce_in_bf16"] = True
        yield Translated("grad_reduce_in_bf16", f"gradients are bf16, as data_types.grad_accum_dtype of {flag(CONFIG)} says")


def _offloaded(values: dict[str, Any], what: str) -> Translated:
    """The optimizer's state and its step in host memory; on the device where parameters are sharded, too."""
    if values.get("zero_stage") == 3 or values.get("use_megatron_fsdp"):
        said = f"{what}: with ZeRO's stage 3 the optimizer's state is in host memory in the original, but is counted on the device"
        return Translated("optimizer_cpu_offload", said, uncertain=True)
    values |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
    return Translated("optimizer_cpu_offload", f"{what} is planned as --optimizer-cpu-offload, {_SHARDS}", uncertain=True)


def _sharded(values: dict[str, Any]) -> list[Translated]:
    """ZeRO's stages: of the optimizer's state; of gradients, too; of parameters, too."""
    stage = values.get("zero_stage")
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3) or (stage == 3 and values.get("pipeline_model_parallel_size") not in (None, 1)):
        return []
    del values["zero_stage"]
    engine = values.get("deepspeed") and not values.get("no_pipeline_parallel")
    if not stage and not (engine and values.get("bf16")):
        return []
    values["use_distributed_optimizer"] = True
    if not stage:
        if values.get("transformer_impl") == "local":
            values[OWN_MODULES] = {**values.get(OWN_MODULES, {}), "all_reduce_gradients": True}
        said = "bf16 without ZeRO: DeepSpeed's optimizer of bf16 pipelines shards its state, and is read as --use-distributed-optimizer"
        return [Translated("use_distributed_optimizer", f"{said}, {_SHARDS}", uncertain=True)]
    if stage == 3:
        values |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
        values |= {"gradient_accumulation_fusion": None, "no_gradient_accumulation_fusion": True}
        said = f"ZeRO's stage 3 is planned as Megatron-FSDP, {_SHARDS}"
        return [Translated("use_megatron_fsdp", said, uncertain=True)]
    said = f"--zero-stage {stage} of DeepSpeed is read as --use-distributed-optimizer, {_SHARDS}"
    said += "; gradients are sharded in the original, but counted unsharded" if stage == 2 else ""
    return [Translated("use_distributed_optimizer", said, uncertain=True)]


def _stages(values: dict[str, Any]) -> Translated:
    """Stages of DeepSpeed that count modules by the names of their classes: layers, the embedding, and a tied head, which has its class.

    Source: `megatron/model/gpt_model.py` of bigscience-workshop/Megatron-DeepSpeed, `PipelineModule` of DeepSpeed.
    """
    method = values.pop("pp_partition_method")
    tied = not (values.get("untie_embeddings_and_output_weights") or values.get("no_tie_embed_logits"))
    values |= {"account_for_embedding_in_pipeline_split": True, **({"account_for_loss_in_pipeline_split": True} if tied else {})}
    counted = "embedding and head" if tied else "embedding"
    return Translated("account_for_embedding_in_pipeline_split", f"--pp-partition-method {method} counts {counted} as layers of stages")


def _experts(values: dict[str, Any]) -> list[Translated]:
    """Experts of Megatron-DeepSpeed, in every second layer and with one choice by default.

    Source: `megatron/arguments.py` and `megatron/model/transformer.py` of deepspeedai/Megatron-DeepSpeed: a layer has experts if its
    number, from 1, divides by `--expert-interval`.
    """
    interval, choices = values.pop("expert_interval", 2), values.pop("topk", 1)
    if values["num_experts"] == 1:
        del values["num_experts"]
        return [Translated("num_experts", "--num-experts 1 of DeepSpeed is a dense model")]
    values.setdefault("moe_router_topk", choices)
    layers = values.get("num_layers")
    if not (isinstance(interval, int) and isinstance(layers, int) and interval > 0 and layers > 0):
        values["expert_interval"] = interval  # listed among the arguments that are not known
        return []
    values.setdefault("moe_layer_freq", [int(layer % interval == 0) for layer in range(1, layers + 1)])
    said = f"of DeepSpeed: in every layer whose number is divisible by {interval}, with {choices} for each token"
    return [Translated("num_experts", f"--num-experts {values['num_experts']} {said}")]
