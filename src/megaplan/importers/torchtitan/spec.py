"""`import_torchtitan`: a job configuration of torchtitan as a spec whose host is torchtitan."""

import json
import re
from collections.abc import Sequence
from math import prod
from typing import Any, NoReturn

from megaplan.diagnostics import diagnostic, refuse
from megaplan.errors import Location, Severity
from megaplan.importers.imported import Imported
from megaplan.importers.structure import Policy
from megaplan.importers.torchtitan.config import ADAM, JobConfig, Launch
from megaplan.importers.torchtitan.fork import fork_flavor, stated_flavor, tokens_of
from megaplan.importers.torchtitan.hosts import check_for_hosts
from megaplan.importers.torchtitan.keys import DEFAULTS, ONE_RANK, Age
from megaplan.importers.torchtitan.models import (
    FLAVORS,
    GPT_OSS,
    MODELS,
    REFUSED,
    SUFFIXES,
    Flavor,
    flavors_of,
    gpt_oss,
    nearest,
    registered,
    section_of,
)
from megaplan.importers.torchtitan.stages import SCHEDULE, read_stages, spans_of_blocks
from megaplan.schedules.registry import SCHEDULES
from megaplan.spec.document import Document, SourceMap, parse_document
from megaplan.spec.overrides import apply_overrides

REASON = "the stages of the torchtitan job"
FLOAT8 = "quantize.linear.float8."
CONVERTERS = ("float8", "quantize.dense.float8", "quantize.linear.float8")
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
RMSNORMS = "rmsnorm", "fused_rmsnorm", "compiled_rmsnorm"
"""Norms with a weight alone; all keep their input and its root mean square."""
LAUNCHED = 8
"""GPUs of torchtitan's own `run_train.sh`."""
MAX_DIGITS = 9
"""Most digits of a count that is written as text."""
NO_CLIP = 1e30
"""Norm that exports write where gradients are not clipped."""
UNCAST = {"output", "lm_head", "router.gate"}
"""Modules outside the linears of blocks; the router's product is fp32."""
EXPERT_AXES = "ep", "etp"
DEGREES = {
    "pp": "pipeline_parallel", "dp_replicate": "data_parallel_replicate", "dp_shard": "data_parallel_shard", "cp": "context_parallel",
    "tp": "tensor_parallel", "ep": "expert_parallel", "etp": "expert_tensor_parallel",
}  # fmt: skip
"""torchtitan's name of each axis of the mesh; its key ends in `_degree`."""
LOCAL, GLOBAL = "training.local_batch_size", "training.global_batch_size"
PUBLISHED = re.compile(r"/[A-Za-z][\w.]*-[\w.-]*\d")
"""Part of a name on a hub that no flavor has: letters, a dash and a size or version."""
EXAMPLE = "llama3/8B"
"""Model whose sizes are the example for a model that resembles none in the registry."""
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"


def import_torchtitan(
    text: str,
    name: str,
    overrides: Sequence[str] = (),
    gpus: int | None = None,
    model: str | None = None,
    function: str | None = None,
    policy: Policy | None = None,
    launch: Launch | None = None,
) -> Imported:
    """The spec of a job.

    Args:
        text: TOML, the JSON of torchtitan's own sections, or Python of a `config_registry.py`.
        name: Name of the file in diagnostics.
        overrides: `KEY=VALUE` texts, keys of the spec; `model=…` states a model that is not in torchtitan's registry.
        gpus: GPUs of the job, needed if a degree is -1.
        model: NAME/FLAVOR of the registry, needed if the file has no section `model`.
        function: Configuration of a Python file that has several.
        policy: Policy for keys that the importer does not know.
        launch: Settings of the launch of the job.

    Raises:
        MegaplanError: Every error found: MP913, MP914, MP916, MP932, MP933, or those of the spec that results.
    """
    config = JobConfig(text, name, function, policy, launch)
    if model is not None:
        name_of_model, _, config.values["model.flavor"] = model.partition("/")
        config.values["model.name"] = registered(name_of_model)
    settings = (*config.settings, *overrides)
    _set_degrees(config, settings)
    plain, stated = _document(config, _title(function or name), gpus, _stated_model(settings))
    notes = config.finish()
    document, loaded, beyond = check_for_hosts(apply_overrides(Document(plain, SourceMap(name)), settings), config, policy or Policy())
    size = loaded.spec.mesh.world_size
    if gpus is not None and size != gpus:
        raise refuse("MP914", f"the degrees make {size} ranks, and --gpus {gpus}", f"--gpus {size}", file=name, key="mesh")
    assumed = diagnostic("MP917", f"{size} GPUs until set", Location(name), (f"--gpus {size}",), severity=Severity.NOTE)
    return Imported.of(document, (*notes, *beyond, *([] if stated else [assumed])), loaded)


def _set_degrees(config: JobConfig, settings: Sequence[str]) -> None:
    """Gives the file the degrees that settings have, because the ranks that are left, the batch and the stages follow from them."""
    for key, _, text in (setting.partition("=") for setting in settings):
        section, _, axis = key.strip().partition(".")
        if section == "mesh" and axis in DEGREES and text.strip().isdecimal() and len(text.strip()) <= MAX_DIGITS:
            config.values[f"parallelism.{DEGREES[axis]}_degree"] = int(text)


def _stated_model(settings: Sequence[str]) -> dict[str, Any] | None:
    """The whole section `model`, if a setting states it."""
    texts = [text for key, _, text in (setting.partition("=") for setting in settings) if key.strip() == "model"]
    found = parse_document(texts[-1], None).value if texts else None
    return found if isinstance(found, dict) and isinstance(found.get("num_layers"), int) else None


def _document(config: JobConfig, title: str, gpus: int | None, model: dict[str, Any] | None) -> tuple[dict[str, Any], bool]:
    model = _section(config) if model is None else model
    blocks = model["num_layers"] // 2
    mesh, stated = _mesh(config, gpus, routed="moe" in model)
    kinds = {schedule.torch_name: kind for kind, schedule in SCHEDULES.items() if schedule.torch_name is not None}
    kind = config.choice(SCHEDULE, kinds)
    starts = read_stages(config, blocks, mesh["pp"], looped=SCHEDULES[kind].least_vpp > 1) if mesh["pp"] > 1 else [0]
    mesh["vpp"] = max(1, len(starts) // mesh["pp"])
    if len(starts) != mesh["pp"] * mesh["vpp"]:
        config.refuse("parallelism.pipeline_parallel_degree", f"{len(starts)} stages are not a multiple of the pipeline degree")
    micro, count, updates = _batch(config, mesh)
    schedule: dict[str, Any] = {"num_microbatches": count, "steps_per_update": updates}
    plain: dict[str, Any] = {
        "format": "megaplan.spec/1",
        "name": title,
        "model": model,
        "mesh": mesh,
        "sharding": {"reshard_after_forward": _reshards(config, mesh["pp"])},
        "schedule": {"kind": kind, **schedule} if mesh["pp"] > 1 else schedule,
        "batch": {"micro_batch_size": micro, "seq_length": config.whole("training.seq_len")},
        **_state(config),
        **_checkpointing(config),
        "training": {
            "steps": config.whole("training.steps"),
            "learning_rate": config.number("optimizer.lr"),
            "weight_decay": config.number("optimizer.weight_decay"),
            "gradient_clip": _clip(config),
        },
    }
    if config.beyond and (config.age is Age.TOML_2024 or mesh["tp"] * mesh["pp"] > 1):
        plain["precision"]["params"] = "fp32"  # later versions cast products of one GPU automatically
    plain["host"] = _host(config) | plain.pop("host")
    if plain["host"].get("compile_model") and "moe" in plain["model"] and config.age is Age.CURRENT and not config.always_shards:
        plain["host"]["eager_combine"] = True  # files in Python came after the versions that compile the parts of experts one by one
    if mesh["pp"] > 1:
        plain["split"] = {"mode": "manual", "spans": spans_of_blocks(starts, blocks), "reason": REASON}
    return plain, stated


def _clip(config: JobConfig) -> float | None:
    """The norm to which gradients are clipped; None for a norm that no gradient reaches, and for −1, by which forks disable it."""
    norm = -1.0 if config.values.get("training.max_norm") == -1 else config.number("training.max_norm")
    return norm if 0 < norm < NO_CLIP else None


def _section(config: JobConfig) -> dict[str, Any]:
    """The section `model` of the job's flavor."""
    name, own = str(config.value("model.name")), _plain(str(config.value("model.flavor")))
    if name == "gpt_oss" and own in GPT_OSS:
        return gpt_oss(GPT_OSS[own])
    flavor = _flavor(config)
    if config.values.get("model.n_layers") is not None:  # Primus's, of a flavor's field
        flavor = flavor._replace(blocks=config.whole("model.n_layers"))
    if flavor.scored_first:
        config.say("rows are multiplied by their scores before the experts; the estimate has it after them: the same bytes, later")
    return flavor.section()


def _flavor(config: JobConfig) -> Flavor:
    name, flavor = str(config.value("model.name")), str(config.value("model.flavor"))
    if config.stated is not None:
        if (stated := stated_flavor(config.stated, name)) is not None:
            return stated
        config.unread("model.flavor", config.stated.line)
        config.finish()
    if (built := config.values.get("model.config")) and isinstance(built, str):
        named = "a fork builds the model of this config, and not of a flavor of torchtitan"
        config.refuse("model.config", named, f"megaplan estimate {built} --gpus 8")
        config.finish()
    why = REFUSED.get(f"{name}/{flavor}", REFUSED.get(name))
    if why is not None:
        config.refuse(
            "model.flavor", f"of model {name}: {why}", "megaplan estimate CONFIG.json --gpus 8   # the published model's, on host megarun"
        )
        config.finish()  # its remaining keys belong to a model that has no spec
    elif (own := fork_flavor(config.name, name, flavor, _tokenizer(config))) is not None:
        return own
    if config.values.get("model.norm_type", RMSNORMS[0]) not in RMSNORMS:
        config.refuse("model.norm_type", f"norms of other tensors than {', '.join(RMSNORMS)}", f"norm_type = {RMSNORMS[0]}")
    named, flavor = flavor, _plain(flavor)
    if flavor not in FLAVORS.get(name, {}):
        _refuse_flavor(config, name, flavor)
    if named != flavor:
        config.say(f"model.flavor = {named} is read with the sizes of {name}/{flavor}, as torchtitan has it; a fork's may differ")
    found = FLAVORS[name][flavor]
    tokens = tokens_of(config.name, _tokenizer(config)) if name.startswith("llama") else None
    return found if tokens is None else found._replace(vocab=tokens)


def _refuse_flavor(config: JobConfig, name: str, flavor: str) -> NoReturn:
    """Refuses a flavor that is in no registry; nothing else of the file is judged, because all of it belongs to a model without sizes."""
    own, like = flavors_of(name), nearest(name, flavor)
    known = [f"{name}/{each}" for each in own] or [f"{each}/…" for each in MODELS]
    sizes = json.dumps(section_of(like or EXAMPLE)).replace('"', "")
    stated = f"--set 'model={sizes}'   # sizes of {like or EXAMPLE}; write those of {name}/{flavor}"
    near = [f"--model {like}"] if like else []
    public = flavor if "/" in flavor else name if "/" in name else f"{name}/{flavor}"
    if PUBLISHED.search(public):  # OWNER/MODEL of a hub
        near = [f"megaplan estimate {public} --gpus 8   # the published model, on host megarun"]
    config.wrong("model.flavor", f"with model.name = {name} one of {', '.join(known)}", *near, stated)
    raise config.refusal()


def _tokenizer(config: JobConfig) -> str | None:
    """The tokenizer that gives the vocabulary: the one of a key that versions until mid-2025 have."""
    found = config.values.get("model.tokenizer_path")
    return found if isinstance(found, str) else None


def _plain(flavor: str) -> str:
    """A flavor without suffixes that change only its kernels."""
    while (end := next((each for each in SUFFIXES if flavor.endswith(each)), None)) is not None:
        flavor = flavor.removesuffix(end)
    return flavor


def _mesh(config: JobConfig, gpus: int | None, *, routed: bool) -> tuple[dict[str, Any], bool]:
    """Degrees, and true if the file and `gpus` state the GPUs; `routed` models have experts, which borrow the data ranks."""
    mesh: dict[str, Any] = {axis: config.whole(f"parallelism.{DEGREES[axis]}_degree") for axis in ("pp", "dp_replicate", "cp", "tp")}
    experts = {axis: config.whole(f"parallelism.{DEGREES[axis]}_degree") for axis in EXPERT_AXES}
    for axis, degree in experts.items():
        if degree > 1 and not routed:
            name = f"{DEGREES[axis]}_degree"
            config.refuse(f"parallelism.{name}", "the model has no experts", f"{name} = 1")
    key = "parallelism.data_parallel_shard_degree"
    shard, others = config.whole(key, -1), prod(mesh.values())
    if shard == 0:
        config.wrong(key, "-1 for the ranks that are left, or a degree")
        shard = 1
    stated = shard > 0 or gpus is not None
    if shard < 0:
        shard = max(1, gpus // others) if gpus is not None else _launched(config, mesh, experts["ep"], others)
    if gpus is not None and shard * others != gpus:
        config.refuse(key, f"the degrees make {shard * others} ranks, and --gpus {gpus}", f"--gpus {shard * others}")
    mesh["dp_shard"] = shard
    if stated and not config.always_shards and shard * mesh["cp"] * mesh["dp_replicate"] == 1:
        config.beyond.append(f"one data rank and torchtitan {config.age.value}: {ONE_RANK[config.age]}")
    if experts["ep"] > 1 and routed:
        mesh["ep"] = experts["ep"]
    if experts["etp"] > 1 and routed:
        mesh["etp"] = experts["etp"]
    return mesh | ({"vocab_parallel": True} if mesh["tp"] > 1 else {}), stated


def _launched(config: JobConfig, mesh: dict[str, Any], ep: int, others: int) -> int:
    """Data ranks of a job without a number of GPUs: the launcher's, or fewer for the batch; at least those of experts and replicas."""
    replicated, cp = mesh["dp_replicate"] > 1 and mesh["cp"] == 1, int(mesh["cp"])
    least = max(2 if replicated else 1, -(-ep // cp))
    found = max(least, LAUNCHED // others)
    whole, local = (config.values.get(key, DEFAULTS[key]) for key in (GLOBAL, LOCAL))
    if isinstance(whole, int) and isinstance(local, int) and whole > 0:
        fitting = (shard for shard in range(found, least, -1) if whole % max(1, local * shard * mesh["dp_replicate"]) == 0)
        return next(fitting, least)
    return found


def _batch(config: JobConfig, mesh: dict[str, Any]) -> tuple[int, int, int]:
    """Sequences of a microbatch, microbatches of a schedule step, and steps of an update."""
    local, whole = config.whole(LOCAL), config.whole(GLOBAL, -1)
    step = local * mesh["dp_replicate"] * mesh["dp_shard"]
    updates = 1 if whole < 1 else whole // step
    if whole > 0 and whole != max(1, updates) * step:
        config.refuse(GLOBAL, f"it is not a multiple of {step}, which the data ranks read at once", f"global_batch_size = {step}")
    updates = max(1, updates)
    if mesh["pp"] == 1:
        return local, updates, 1
    if config.age is Age.TOML_2024:
        count = config.value("parallelism.pipeline_parallel_microbatches") or mesh["pp"]
    else:
        count = local // config.whole("parallelism.pipeline_parallel_microbatch_size") or 1
    if local % count:
        config.refuse(LOCAL, f"it is not a multiple of {count} microbatches")
        return 1, count, updates
    return local // count, count, updates


def _reshards(config: JobConfig, pp: int) -> bool:
    return bool(config.choice("parallelism.fsdp_reshard_after_forward", {"default": pp == 1, "always": True, "never": False}))


def _state(config: JobConfig) -> dict[str, Any]:
    master = config.choice("training.dtype", DTYPES)
    precision: dict[str, Any] = {
        "params": config.choice("training.mixed_precision_param", DTYPES),
        "reduce": config.choice("training.mixed_precision_reduce", DTYPES),
        **dict.fromkeys(("grads", "master", "moments"), master),
    }
    others = [name for name in config.names("model.converters") if name not in CONVERTERS]
    if adapters := [name for name in others if "lora" in name.lower()]:
        config.refuse("model.converters", f"{', '.join(adapters)} is not priced; float8 linears are", "converters = []")
    elif others:
        config.say(f"not read of model.converters: {', '.join(others)}; products are in {precision['params']}")
    if config.low or len(config.names("model.converters")) > len(others):
        precision["recipe"] = _recipe(config)
    if not str(config.value("optimizer.name")).endswith(ADAM):
        config.wrong("optimizer.name", "AdamW, Adam, or a fork's own one of these", "--ignore optimizer.name")
    return {"precision": precision, "optimizer": {"matrix": "adamw"}}


def _recipe(config: JobConfig) -> dict[str, Any]:
    key, skipped = FLOAT8 + "recipe_name", FLOAT8 + "filter_fqns"
    name = config.value(key) or "tensorwise"
    recipes = {"tensorwise": "fp8_current", "rowwise": "fp8_rowwise"}
    if name not in recipes:
        config.refuse(key, "of torchao's recipes tensorwise and rowwise are priced", "recipe_name = tensorwise")
    filters = ["output"] if config.age is Age.TOML_2024 else config.names(skipped)
    if set(filters) - UNCAST:
        config.refuse(skipped, "float8 linears of all blocks, and not of the output, are priced", 'filter_fqns = ["output"]')
    elif not {"output", "lm_head"} & set(filters):
        config.say("float8 of the head's product is not carried over")
    gathers = config.switch(FLOAT8 + "enable_fsdp_float8_all_gather")
    return {"name": recipes.get(str(name), "fp8_current"), **({"param_gather": True} if gathers else {})}


def _checkpointing(config: JobConfig) -> dict[str, Any]:
    """The section `recompute` and the keys of `host` that belong to it."""
    mode = config.value(MODE)
    if mode == "memory_budget":
        config.refuse(MODE, "tensors that the compiler's partitioner saves under a budget are not priced", 'mode = "selective"')
    policy = config.choice(MODE, {"selective": "selective", "full": "full", "none": "none", "memory_budget": "none"})
    if policy != "selective":
        return {"recompute": {"default": policy}, "host": {}}
    option = str(config.value(OPTION))
    if option == "op":
        return {"recompute": {"default": "selective"}, "host": {}}
    if not option.isdecimal() or len(option) > MAX_DIGITS or not int(option):
        config.wrong(OPTION, "op, or how many blocks there are for one that is checkpointed")
        return {"recompute": {"default": "full"}, "host": {}}
    return {"recompute": {"default": "full"}, "host": {"checkpoint_every": int(option)}}


def _host(config: JobConfig) -> dict[str, Any]:
    """Keys of `host` that follow from the file's age and its switches."""
    compiles = config.switch("compile.enable")
    components = [] if not compiles else config.names("compile.components") if config.age is Age.CURRENT else ["model", "loss"]
    if compiles and config.age is Age.TOML_2024:
        components = ["model"]
    old = config.age is not Age.CURRENT
    foreach = config.choice("optimizer.implementation", {"fused": False, "foreach": True, "for-loop": False})
    host: dict[str, Any] = {
        "compile_model": "model" in components,
        "compile_loss": "loss" in components,
        "repeat_kv": old,
        "fsdp_ends": "root" if old else "separate",
        "async_tensor_parallel": config.switch("parallelism.enable_async_tensor_parallel"),
        "keep_pipeline_outputs": old,
        "foreach_optimizer": foreach,
    }
    return {"name": "torchtitan", **{key: value for key, value in host.items() if value not in (False, "separate")}}


def _title(name: str) -> str:
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rpartition("/")[2].partition(".")[0]).strip("-._")
    return last[:100] or "torchtitan"
