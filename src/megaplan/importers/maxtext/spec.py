"""`import_maxtext`: a MaxText run as a spec whose host is maxtext."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, prod
from typing import Any

from megaplan.devices import TPU, load_device
from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError, Severity
from megaplan.hosts.maxtext.policies import TENSORS
from megaplan.importers.imported import Imported
from megaplan.importers.maxtext.config import MaxTextConfig
from megaplan.importers.maxtext.keys import AXES, SLICE, SLICES
from megaplan.importers.maxtext.model import BLOCKS, DEFAULTS, cycle_of, section_of
from megaplan.importers.structure import Policy
from megaplan.spec.document import Document, SourceMap
from megaplan.spec.host_words import RematPolicy
from megaplan.spec.overrides import apply_overrides

DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
ATTENTION = {"autoselected": "auto", "flash": "flash", "cudnn_flash_te": "fused", "dot_product": "unfused"}
FP8 = {"name": "fp8_current"}
QUANTIZATION = {"": None, "int8": "int8", "fp8": FP8, "fp8_full": FP8, "fp8_gpu": FP8, "nanoo_fp8": FP8}
SLICE_NAME = re.compile(r"(?P<kind>v5p|v6e|tpu7x|v7x)-(?P<size>\d+(?:x\d+)*)")
KINDS = {"v5p": ("tpu-v5p", 1, 2), "v6e": ("tpu-v6e", 1, 1), "tpu7x": ("tpu-v7", 2, 2), "v7x": ("tpu-v7", 2, 2)}
"""Device of a kind of slice, devices a chip, and TensorCores a chip, which a name of one number counts."""
PER_NODE = {"tpu-v5p": 4, "tpu-v6e": 8, "tpu-v7": 8, "h100-sxm": 8}
"""Devices of a host machine."""
ASSUMED = {"tpu": "tpu-v5p", "gpu": "h100-sxm", "gpu_multiprocess": "h100-sxm"}
"""Device by `hardware`, if no topology is named."""
ASSUMED_COUNT = 8


@dataclass(frozen=True, slots=True)
class Slices:
    """Devices of a run: type, number per slice, number of slices, and true if the inputs state them."""

    device: str
    size: int
    count: int
    stated: bool


def import_maxtext(
    inputs: Sequence[str], overrides: Sequence[str] = (), devices: int | None = None, policy: Policy | None = None
) -> Imported:
    """The spec of a run.

    Args:
        inputs: Files of MaxText, scripts, and `key=value` arguments; later ones override earlier ones.
        overrides: `KEY=VALUE` texts, keys of the spec.
        devices: Devices of the run in all slices, needed if a degree is -1 and no topology is named.
        policy: Policy for keys that the importer does not know.

    Raises:
        MegaplanError: Every error found: MP913, MP914, MP916, or those of the spec that results.
    """
    config = MaxTextConfig(inputs, policy)
    slices = _slices(config, devices)
    plain = _document(config, slices)
    notes = config.finish()
    if not slices.stated:
        hints = ("--devices N", "compile_topology=v6e-256")
        detail = f"{slices.size * slices.count} devices of {slices.device} until set"
        notes.append(diagnostic("MP917", detail, Location(config.name), hints, severity=Severity.NOTE))
    document = apply_overrides(Document(plain, SourceMap(config.name)), (*config.settings, *overrides))
    return Imported.of(document, notes)


def _slices(config: MaxTextConfig, devices: int | None) -> Slices:
    name, count = str(config.value(SLICE)), max(1, int(config.values.get(SLICES) or 1))
    match = SLICE_NAME.fullmatch(name)
    if match is None:
        if name:
            config.wrong(SLICE, f"a slice such as v5p-128, v6e-256 or tpu7x-4x4x8: {', '.join(KINDS)}")
        degrees = [config.value(f"{kind}_{axis}_parallelism") for kind in ("ici", "dcn") for axis in AXES]
        inside, across = degrees[: len(AXES)], [max(1, degree) for degree in degrees[len(AXES) :]]
        count = prod(across)
        stated = devices is not None or min(inside) > 0
        others = prod(degree for degree in inside if degree > 0)
        size = devices // count if devices is not None else others if min(inside) > 0 else max(others, ASSUMED_COUNT)
        return Slices(config.choice("hardware", ASSUMED), max(1, size), count, stated)
    device, a_chip, cores = KINDS[match["kind"]]
    sizes = [int(size) for size in match["size"].split("x")]
    chips = prod(sizes) if len(sizes) > 1 else sizes[0] // cores
    return Slices(device, max(1, chips * a_chip), count, stated=True)


def _document(config: MaxTextConfig, slices: Slices) -> dict[str, Any]:
    model = _model(config)
    inside, across = _degrees(config, "ici", slices.size), _degrees(config, "dcn", slices.count)
    both = {axis: inside[axis] * across[axis] for axis in AXES}
    _check_slices(config, both, across, slices.count)
    size = slices.size * slices.count
    if prod(both.values()) != size:
        config.refuse("ici_fsdp_parallelism", f"the degrees make {prod(both.values())} devices, but there are {size}")
    routed = "moe" in model
    mesh = {
        "pp": both["pipeline"],
        "dp_replicate": both["data"],
        "dp_shard": both["fsdp"] * both["fsdp_transpose"] * both["expert"],
        "cp": both["context"],
        "tp": both["tensor"],
        "ep": both["expert"],
    }
    if both["tensor"] > 1:
        mesh |= {"vocab_parallel": True} | ({"etp": both["tensor"]} if routed else {})
    if both["expert"] > 1 and not routed:
        config.refuse("ici_expert_parallelism", "the model has no experts", "ici_expert_parallelism=1")
    mesh["vpp"] = _repeats(config, model["num_layers"] // 2, mesh["pp"])
    micro, schedule = _batch(config, mesh)
    device = load_device(slices.device)
    domain = device.domain.value
    plain = {
        "format": "megaplan.spec/1",
        "name": _title(config),
        "model": model,
        "mesh": mesh,
        "sharding": {"reshard_after_forward": not config.switch("pipeline_fsdp_ag_once") and mesh["dp_shard"] * mesh["cp"] > 1},
        "schedule": schedule,
        "batch": {"micro_batch_size": micro, "seq_length": config.whole("max_target_length")},
        "device": {
            **{"name": slices.device, "per_node": PER_NODE[slices.device]},
            **({"domain": min(slices.size, domain)} if device.generation == TPU else {}),
        },
        **_policies(config, both),
        "training": _training(config),
    }
    if mesh["pp"] > 1:
        plain["split"] = {"mode": "equal"}
    return plain


def _title(config: MaxTextConfig) -> str:
    found = str(config.value("run_name") or config.value("model_name"))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", found).strip("-.") or "maxtext"


def _model(config: MaxTextConfig) -> dict[str, Any]:
    given = {key: config.values.get(key, default) for key, default in DEFAULTS.items()}
    block = given["decoder_block"]
    if block not in BLOCKS:
        config.refuse("decoder_block", "its layers are not priced", *(f"decoder_block={each}" for each in ("llama2", "qwen3_moe")))
        config.stop()
    if given["share_kv_projections"] and block != "gemma4":
        config.refuse("share_kv_projections", f"blocks {block} have projections of both here", "share_kv_projections=false")
    try:
        return section_of(given)
    except MegaplanError as error:
        found = [diagnostic(each.code, each.detail, Location(config.name, key="decoder_block")) for each in error.diagnostics]
        raise MegaplanError([each for each in found if each.severity is Severity.ERROR]) from None


def _degrees(config: MaxTextConfig, kind: str, size: int) -> dict[str, int]:
    """Degree of each axis; -1, allowed once, means the remaining devices or slices."""
    keys = {axis: f"{kind}_{axis}_parallelism" for axis in AXES}
    found = {axis: config.whole(key, -1) for axis, key in keys.items()}
    open_axes = [axis for axis, degree in found.items() if degree < 1]
    if len(open_axes) > 1:
        config.wrong(keys[open_axes[1]], "-1 for one axis alone")
    for axis in open_axes:
        others = prod(degree for degree in found.values() if degree > 0)
        found[axis] = max(1, size // others)
    return found


def _check_slices(config: MaxTextConfig, both: dict[str, int], across: dict[str, int], count: int) -> None:
    """Refuses axes over slices that a spec's rank order cannot express: stages first, then copies, then shards."""
    if across != slice_degrees(both, count):
        shown = ", ".join(f"{axis} {degree}" for axis, degree in across.items() if degree > 1)
        axis = next((axis for axis, degree in across.items() if degree > 1), "data")
        why = f"over {count} slices are {shown or 'none'}; a spec has stages over slices first, then data, then fsdp"
        config.refuse(f"dcn_{axis}_parallelism", why)


def slice_degrees(both: dict[str, int], count: int) -> dict[str, int]:
    """Degrees over slices of axes with these degrees in all: of stages, copies and shards, in the order of a spec's ranks."""
    found = dict.fromkeys(both, 1)
    for axis in ("pipeline", "data", "fsdp", "fsdp_transpose", "expert", "context", "tensor"):
        found[axis] = gcd(count, both[axis])
        count //= found[axis]
    return found


def _repeats(config: MaxTextConfig, layers: int, stages: int) -> int:
    if stages == 1:
        return 1
    own = config.whole("num_layers_per_pipeline_stage")
    if layers % (stages * own):
        config.refuse("num_layers_per_pipeline_stage", f"{layers} layers are not a multiple of {stages} stages with so many each")
    return max(1, layers // (stages * own))


def _batch(config: MaxTextConfig, mesh: dict[str, int]) -> tuple[int, dict[str, Any]]:
    """Sequences of a microbatch, and the schedule: accumulation without stages, microbatches of a loop with them."""
    world = prod(mesh[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    rows = Fraction(config.number("per_device_batch_size")).limit_denominator(1 << 20) * world / (mesh["dp_replicate"] * mesh["dp_shard"])
    updates = config.whole("gradient_accumulation_steps")
    count = 1
    schedule: dict[str, Any] = {"num_microbatches": updates}
    if mesh["pp"] > 1:
        stated = config.whole("num_pipeline_microbatches", -1)
        count = stated if stated > 0 else mesh["pp"]
        schedule = {"kind": "interleaved_1f1b" if mesh["vpp"] > 1 else "gpipe", "num_microbatches": count, "steps_per_update": updates}
    micro = rows / count
    if micro.denominator != 1 or micro < 1:
        config.refuse("per_device_batch_size", f"it gives {float(micro):g} sequences per microbatch on a data rank")
        return 1, schedule
    return int(micro), schedule


def _policies(config: MaxTextConfig, both: dict[str, int]) -> dict[str, Any]:
    dtype, master = config.choice("dtype", DTYPES), config.choice("weight_dtype", DTYPES)
    moments = config.choice("mu_dtype", {"": master, **DTYPES})
    opt = config.choice("opt_type", {"adamw": moments, "adam_pax": master})  # adam_pax has both moments in the parameters' dtype
    low = config.choice("quantization", QUANTIZATION)
    host: dict[str, Any] = {"name": "maxtext"}
    policy = str(config.value("remat_policy")).replace("minimal_flash", "minimal_with_context")
    recompute = policy if policy in ("none", "full") else "selective"
    if recompute == "selective":
        if policy not in RematPolicy.__args__:  # type: ignore[attr-defined]  # names of a Literal
            config.refuse("remat_policy", "it is not priced", "remat_policy=full")
        host["remat_policy"] = policy
        if policy == "custom":
            places = {name: config.choice(name, {each: each for each in ("remat", "device", "offload")}) for name in TENSORS}
            host["remat_tensors"] = {name: place for name, place in places.items() if place != "remat"}
    given = {key: config.values.get(key, default) for key, default in DEFAULTS.items()}
    cycle = cycle_of(given) if config.switch("scan_layers") else 1
    host |= {"layers_per_block": cycle} if cycle > 1 else {}
    host |= {"num_vocab_tiling": tiles} if (tiles := config.whole("num_vocab_tiling")) > 1 else {}
    host |= {"fsdp_transpose": both["fsdp_transpose"]} if both["fsdp_transpose"] > 1 else {}
    host |= {"int8": True} if low == "int8" else {}
    host |= {"optimizer_offload": 1.0} if config.switch("optimizer_memory_host_offload") else {}
    host["attention_backend"] = config.choice("attention", ATTENTION)
    if host["attention_backend"] == "unfused":
        config.refuse("attention", "the attention probabilities that it saves are not priced", "attention=autoselected")
    precision = {"params": dtype, "master": master, "grads": config.choice("grad_dtype", DTYPES), "moments": opt, "reduce": dtype}
    return {
        "precision": precision | ({"recipe": low} if isinstance(low, dict) else {}),
        "optimizer": {"matrix": "adamw"},
        "recompute": {"default": recompute},
        "host": host,
    }


def _training(config: MaxTextConfig) -> dict[str, Any]:
    steps, clip = config.whole("steps"), config.number("gradient_clipping_threshold")
    warm_up, final = config.number("warmup_steps_fraction"), config.number("learning_rate_final_fraction")
    rate: dict[str, Any] = {"kind": "cosine", "warmup_steps": round(warm_up * steps), "final_fraction": final}
    if config.choice("lr_schedule_type", {"cosine": False, "wsd": True}):
        rate |= {"kind": "wsd", "decay_steps": max(1, round(config.number("wsd_decay_steps_fraction") * steps))}
    elif final == 1:
        rate = {"kind": "constant", "warmup_steps": rate["warmup_steps"]}
    return {
        "steps": steps,
        "seed": config.whole("init_weights_seed", 0),
        "learning_rate": config.number("learning_rate"),
        "weight_decay": config.number("adam_weight_decay"),
        "gradient_clip": clip or None,
        "rate_schedule": rate,
    }
