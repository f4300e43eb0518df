"""Parts of a launch outside its model: mesh, schedule, batch, precision, optimizer, recompute, host."""

import re
from typing import Any, get_args

from megaplan.hosts.megatron.argument import ONLY
from megaplan.hosts.megatron.rows_refused import REFUSED
from megaplan.hosts.megatron.rows_run import AUTO
from megaplan.hosts.megatron.state import MEGATRON_RECIPES, NO_RECIPE
from megaplan.hosts.megatron.vocabulary import ARGUMENTS, FEATURES, other_fsdp
from megaplan.hosts.megatron.workspaces import setting_bytes
from megaplan.importers.megatron.arguments import Arguments
from megaplan.importers.megatron.deepspeed import OWN_MODULES
from megaplan.importers.megatron.model import load_balancing
from megaplan.importers.megatron.stack import LaunchLayers
from megaplan.importers.megatron.unset import unset_names
from megaplan.low_precision import FORMATS
from megaplan.scalars import MAX_MICROBATCHES
from megaplan.spec.host import Host
from megaplan.spec.host_words import GraphModule, OffloadModule

RECIPE_FLAGS = ("fp8_output_proj", "fp8_dot_product_attention", "keep_mtp_spec_in_bf16")
_OLDER_WORDS = "recompute_activations", "moe_layer_recompute"
PRICED_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe")


def world_size(launch: Arguments, given: int | None, least: int) -> tuple[int, bool]:
    """GPUs of the job, and true if the launch states them.

    Args:
        launch: The arguments; nodes and processes of a torchrun line are read.
        given: Number that the caller knows.
        least: Number that the degrees need.
    """
    if given is not None:  # replaces settings that the launch does not state, or states differently
        launch.pass_over("nnodes", "nproc_per_node", "world_size")
        nodes, processes, stated = (launch.values.get(key) for key in ("nnodes", "nproc_per_node", "world_size"))
        found = stated if isinstance(stated, int) else nodes * processes if isinstance(nodes, int) and isinstance(processes, int) else given
        if found != given:
            launch.note("nproc_per_node", f"{given} GPUs, as --gpus says; the launch states {found}")
        return given, True
    counts = {key: launch.values.get(key) for key in ("nnodes", "nproc_per_node", "world_size")}
    lacking = [name for value in counts.values() if isinstance(value, str) for name in unset_names(value)]
    if lacking:
        launch.pass_over(*counts)
        launch.say(f"the number of GPUs depends on {', '.join(dict.fromkeys(lacking))}")
        return least, False
    nodes, processes, stated = launch.value("nnodes"), launch.value("nproc_per_node"), launch.optional("world_size")
    if stated is None and isinstance(processes, int) and isinstance(nodes, int):
        stated = nodes * processes
    return (least, False) if stated is None else (stated, True)


def read_mesh(launch: Arguments, num_stages: int, gpus: int | None) -> tuple[dict[str, Any], bool]:
    """Degrees; and true if the launch states its GPUs."""
    tp, pp, cp, ep = (launch.whole(f"{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context", "expert_model"))
    experts = launch.value("num_experts") is not None
    etp = launch.optional("expert_tensor_parallel_size") or tp
    if not experts:  # they have no effect then
        for key in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            launch.overruled(key, "the model has no experts")
        ep = etp = 1
    inner = tp * cp
    least = pp * inner * max(1, ep * etp // inner)
    total, stated = world_size(launch, gpus, least)
    if total % (pp * inner) or total < least:
        detail = f"{total} GPUs, and tp · pp · cp = {tp} · {pp} · {cp}, ep · etp = {ep} · {etp} need a multiple of {least}"
        if gpus is None and total < least:  # an example whose nodes are still to be filled in
            launch.guess("nnodes", f"{detail}: planned with {least}", "--gpus N")
        else:
            launch.values.setdefault("world_size", total)
            launch.cannot("world_size", detail, least)
        total = least
    data = total // (pp * inner)
    instances = launch.optional("num_distributed_optimizer_instances") or 1
    if data % instances:
        launch.cannot("num_distributed_optimizer_instances", f"{data} data ranks do not divide over it", 1)
        instances = 1
    vpp = num_stages // pp
    mesh = {"pp": pp, "vpp": vpp, "dp_replicate": instances, "dp_shard": data // instances, "cp": cp, "tp": tp, "ep": ep, "etp": etp}
    return {**mesh, "vocab_parallel": tp > 1}, stated


def read_batch(launch: Arguments, mesh: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`batch` and `schedule`."""
    batch = launch.section("batch")
    launch.pass_over("max_position_embeddings")
    size = batch["micro_batch_size"]
    ranks = mesh["dp_replicate"] * mesh["dp_shard"]
    total = launch.optional("global_batch_size") or _last_step(launch) or size * ranks
    if total % (size * ranks):
        why = f"micro_batch_size = {size}, {ranks} data ranks, and {total} % {size * ranks} = {total % (size * ranks)}"
        whole = total - total % (size * ranks)
        if whole and (launch.parsed or launch.values.get("decrease_batch_size_if_needed")):
            stops = "" if launch.values.get("decrease_batch_size_if_needed") else "; Megatron stops without --decrease-batch-size-if-needed"
            launch.warn("global_batch_size", f"{why}: planned with {whole}{stops}")
        else:
            launch.cannot("global_batch_size", why, size * ranks)
    kind = "interleaved_1f1b" if mesh["vpp"] > 1 else "1f1b"
    return {"schedule": {"kind": kind, "num_microbatches": max(1, total // (size * ranks))}, "batch": batch}


def _of_a_fork(launch: Arguments) -> None:
    """Read a fork's optimizer named after Muon or Adam as Muon or Adam, with a warning."""
    word = launch.values.get("optimizer")
    if not isinstance(word, str) or word in ARGUMENTS["optimizer"].words:
        return
    known = next((name for name in ("muon", "adam") if name in word.lower()), None)
    if known is not None:
        launch.values["optimizer"] = f"dist_{known}" if known == "muon" and "dist" in word.lower() else known
        wider = ", which it keeps in fewer bits than are counted" if re.search(r"(?<!\d)[48][-_]?bit|int8|fp8", word.lower()) else ""
        launch.guess("optimizer", f"--optimizer {word} of a fork is read as {known}, with its state{wider}")


def read_state(launch: Arguments, *, gpt: bool) -> dict[str, dict[str, Any]]:
    """`precision` and `optimizer`."""
    _of_a_fork(launch)
    params, halves = _params(launch)
    aware, main = launch.given("use_precision_aware_optimizer"), launch.word("main_grads_dtype")
    words = {key: launch.word(key) for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")}
    for key, word in {"main_grads_dtype": main, **words}.items():
        if word != "fp32" and not aware:
            launch.cannot(key, "Megatron takes fp32 alone without --use-precision-aware-optimizer", "fp32")
    grads = params if halves or (aware and main == "bf16") else "fp32"
    grads, reduced = _sharded_gradients(launch, params) if wholly_sharded(launch) else (grads, grads)
    if main == "bf16" and launch.given("accumulate_allreduce_grads_in_fp32"):
        launch.cannot("main_grads_dtype", "Megatron takes fp32 alone with --accumulate-allreduce-grads-in-fp32", "fp32")
    recipe = _recipe(launch, gpt=gpt)
    return {
        "precision": {
            **{
                "params": params,
                "grads": grads,
                "master": words["main_params_dtype"],
                "moments": words["exp_avg_dtype"],
                "reduce": reduced,
            },
            **({"recipe": recipe} if recipe else {}),
        },
        "optimizer": launch.section("optimizer"),
    }


def read_optimizer(launch: Arguments, recipe: str | None) -> dict[str, Any]:
    """Keys of `host` about the optimizer's state; `recipe` is the one of the linears."""
    first, second, given = (launch.word(key) for key in ("exp_avg_dtype", "exp_avg_sq_dtype", "fp8_recipe"))
    found: dict[str, Any] = {"optimizer": word} if (word := launch.word("optimizer")) in ("lion", "sgd") else {}
    if word == "sgd" and launch.values.get("sgd_momentum") == 0:
        launch.cannot("optimizer", "SGD without momentum keeps no state, and a spec's optimizers have a moment", "adam")
    if second != first:
        found["exp_avg_sq_dtype"] = second
    own = NO_RECIPE if recipe in (None, "nvfp4") else MEGATRON_RECIPES[str(recipe)]
    if launch.given("use_precision_aware_optimizer") and given != own:
        found["optimizer_recipe"] = given
    if not launch.given("optimizer_cpu_offload"):
        launch.pass_over("optimizer_offload_fraction")
    elif fraction := launch.number("optimizer_offload_fraction"):
        found["optimizer_offload"] = fraction
        if not launch.given("use_precision_aware_optimizer") and not launch.parsed:
            launch.cannot("optimizer_cpu_offload", "Megatron-LM's parser has it with --use-precision-aware-optimizer alone")
    return found


def _recipe(launch: Arguments, *, gpt: bool) -> dict[str, Any] | None:
    """`precision.recipe`; a layer of a GPT model is two layers of a spec."""
    wide, narrow = launch.word("fp8_format"), launch.word("fp4_format")
    word, gathered = launch.word("fp8_recipe"), {"fp8": launch.given("fp8_param_gather"), "fp4": launch.given("fp4_param_gather")}
    launch.accept("fp4_recipe")
    ends = [_whole_or_zero(launch, f"num_layers_at_{end}_in_bf16") for end in ("start", "end")]
    kept = launch.given("first_last_layers_bf16") and any(ends)
    past = launch.whole("fp8_amax_history_len"), launch.word("fp8_amax_compute_algo"), _whole_or_zero(launch, "fp8_margin")
    head, attention, without_prediction = [launch.given(key) for key in RECIPE_FLAGS]
    if wide is not None and narrow is not None:
        launch.cannot("fp4_format", "--fp8-format is given too", "")
    if wide is None and narrow is None:
        return None
    theirs = {word: name for name, word in MEGATRON_RECIPES.items()}
    found: dict[str, Any] = {
        "name": "nvfp4" if wide is None else theirs[str(word)],
        "param_gather": gathered["fp4" if wide is None else "fp8"],
        "head": head,
        "attention": attention,
        "prediction": not without_prediction,
    }
    if wide is not None and wide != FORMATS[found["name"]]:
        found["format"] = wide
    if kept:
        found["first_last_bf16"] = [each * (2 if gpt else 1) for each in ends]
    if found["name"] == "fp8_delayed":
        found |= zip(("amax_history", "amax_compute", "margin"), past, strict=True)
    return found


def _sharded_gradients(launch: Arguments, params: str) -> tuple[str, str]:
    """Dtypes in which Megatron-FSDP keeps and reduces gradients; a launch without them may be of a version with other arguments."""
    word, sent = launch.word("megatron_fsdp_main_grads_dtype"), launch.word("megatron_fsdp_grad_comm_dtype")
    grads = params if word == AUTO else str(word)
    if word == AUTO and sent == AUTO and params != "fp32":
        key = "megatron_fsdp_main_grads_dtype"
        launch.note(key, f"gradients are {grads}, as parameters, since --megatron-fsdp-main-grads-dtype says nothing else")
    return grads, grads if sent == AUTO else str(sent)


def _whole_or_zero(launch: Arguments, key: str) -> int:
    """An integer from 0 on."""
    return 0 if launch.value(key) in (None, 0) else launch.whole(key)


def _last_step(launch: Arguments) -> int | None:
    """The last batch of a schedule of batches, such as `0:384 200B:768`."""
    found = re.findall(r":(\d+)", str(launch.values.get("step_batch_size_schedule", "")))
    return int(found[-1]) if found else None


def _params(launch: Arguments) -> tuple[str, bool]:
    """Dtype of parameters, and true if gradients have it too."""
    bf16, fp16 = launch.given("bf16"), launch.given("fp16")
    wide, halved = launch.given("accumulate_allreduce_grads_in_fp32"), launch.given("grad_reduce_in_bf16")
    if bf16 and fp16:
        launch.cannot("fp16", "--bf16 is given too", "")
    if halved and wide:
        launch.overruled("accumulate_allreduce_grads_in_fp32", "--grad-reduce-in-bf16 decides")
    if fp16 and halved:
        launch.cannot("grad_reduce_in_bf16", "parameters are fp16", "")
    if not bf16 and not fp16:
        launch.note("bf16", "neither --bf16 nor --fp16 is given, so Megatron trains in fp32")
        if halved:
            launch.overruled("grad_reduce_in_bf16", "parameters are fp32, as their gradients")
        return "fp32", False
    return ("fp16", not wide) if fp16 else ("bf16", halved)


def read_host(launch: Arguments, stack: LaunchLayers, muon: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """`host` and `recompute`."""
    found: dict[str, Any] = {
        "name": "megatron",
        "model": "hybrid" if stack.hybrid else "gpt",
        **launch.section("host"),
        "cross_entropy": launch.value("cross_entropy_fusion_impl") if launch.given("cross_entropy_loss_fusion") else "unfused",
        "cublas_workspace_kib": _workspace_kib(launch),
        **_allocator(launch),
    }
    launch.given("overlap_param_gather")  # reductions decide `dp_comm_overlap`
    for row in REFUSED:
        if row.conversion is ONLY:
            launch.accept(row.name)
    found |= _kernels(launch, found)
    if "E" in stack.letters or "E" in stack.ahead:
        found["moe_load_balancing"] = load_balancing(launch)[0]
    found |= _graphs(launch) | _offload(launch) | _stash(launch)
    if launch.value("optimizer") == "dist_muon":  # the name shows that its state is sharded over data ranks
        found["distributed_optimizer"] = True
    launch.value("moe_flex_dispatcher_backend")
    found["moe_flex_backend"] = launch.word("moe_flex_dispatcher_backend") if found["moe_dispatcher"] == "flex" else "deepep"
    by_size = launch.given("no_use_layer_wise_param_layout")
    if muon and found["distributed_optimizer"] and launch.given("use_distributed_optimizer") and not by_size:
        found["layer_wise_layout"] = True
    features = _features(launch)
    if features:
        found["features"] = sorted(features)
        launch.pass_over(*(key for key in launch.values if key.startswith("megatron_fsdp_")))
    recompute = _recompute(launch, found, stack.letters)
    return {key: found[key] for key in Host.model_fields if key in found}, recompute


def _kernels(launch: Arguments, host: dict[str, Any]) -> dict[str, Any]:
    """Attention and sequence parallelism, which follow from several arguments."""
    split, several = launch.given("sequence_parallel"), launch.whole("tensor_model_parallel_size") > 1
    found: dict[str, Any] = {"sequence_parallel": False} if several and not split else {}
    if split and not several:
        launch.overruled("sequence_parallel", "--tensor-model-parallel-size is 1")
    flash = launch.given("use_flash_attn") and launch.values.get("attention_backend") is None
    if host["transformer_impl"] == "local":
        found |= {"attention_backend": "unfused", **launch.values.get(OWN_MODULES, {})}
        why = "--transformer-impl local has its own, unfused attention, which saves its probabilities"
        launch.overruled("use_flash_attn", why)
        if launch.values.get("attention_backend") not in ("unfused", "local", "auto"):
            launch.overruled("attention_backend", why)
        if host["moe_grouped_gemm"]:
            found["moe_grouped_gemm"] = False
            launch.overruled("moe_grouped_gemm", "experts of --transformer-impl local run one after another")
    elif flash and not (launch.given("bf16") or launch.given("fp16")):
        launch.overruled("use_flash_attn", "layers are fp32, which it does not take")
    elif flash:
        found["attention_backend"] = "flash"
    return found


def _graphs(launch: Arguments) -> dict[str, Any]:
    """CUDA graphs; a scope of the full iteration covers the whole step for every implementation."""
    kind = str(launch.value("cuda_graph_impl") or "none")
    older = launch.given("enable_cuda_graph"), launch.given("external_cuda_graph")
    words = [word for key in ("cuda_graph_modules", "cuda_graph_scope") for word in _words(launch.value(key))]
    if kind == "none" and not any(older):
        return {}
    if kind == "full_iteration" or "full_iteration" in words:
        return {"cuda_graphs": "iteration"}
    known = [word for word in dict.fromkeys(words) if word in get_args(GraphModule)]
    for word in (one for one in words if one not in (*known, "full")):  # full is whole layers
        launch.cannot("cuda_graph_modules", f"{word} is not priced; the modules that are priced: {', '.join(get_args(GraphModule))}")
    return {"cuda_graphs": "layers", **({"cuda_graph_modules": known} if known else {})}


def _offload(launch: Arguments) -> dict[str, Any]:
    """Modules whose inputs are offloaded, and deferred weight gradients of the head."""
    words, found = _words(launch.value("offload_modules")), dict[str, Any]()
    if launch.given("fine_grained_activation_offloading") and words:
        for word in (one for one in words if one not in get_args(OffloadModule)):
            launch.cannot("offload_modules", f"{word} is not priced; the modules that are priced: {', '.join(get_args(OffloadModule))}")
        found["offload_modules"] = words
    layers = launch.value("cpu_offloading_num_layers")
    if launch.given("cpu_offloading") and layers:
        found["offloaded_layers"] = layers
    limit = _whole_or_zero(launch, "wgrad_deferral_limit")
    if launch.given("defer_embedding_wgrad_compute"):
        found["deferred_head_microbatches"] = limit or MAX_MICROBATCHES
    return found


def _stash(launch: Arguments) -> dict[str, Any]:
    """Buffers of experts with a fixed number of rows."""
    factor = launch.number("moe_paged_stash_buffer_size_factor_cuda")
    return {"moe_paged_stash": factor} if launch.given("moe_paged_stash") else {}


def _words(value: Any) -> list[str]:
    """Words of a list; also of one as Python or YAML writes it."""
    return re.findall(r"[a-z_0-9]+", " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value or ""))


def _features(launch: Arguments) -> set[str]:
    """Features that are listed and not priced."""
    launch.pass_over(*(row.name for row in FEATURES))
    features = {str(row.means) for row in FEATURES if launch.values.get(row.name) not in (None, False, "none", 0)}
    if launch.given("use_megatron_fsdp") and not wholly_sharded(launch):
        features.add("fsdp")
    return features


def wholly_sharded(launch: Arguments) -> bool:
    """True if Megatron-FSDP runs as `sharding.reshard_after_forward` says."""
    return launch.given("use_megatron_fsdp") and not other_fsdp(launch.value)


def _workspace_kib(launch: Arguments) -> int | None:
    """KiB of one handle; None if the launch leaves it to torch."""
    setting = launch.environment.get("CUBLAS_WORKSPACE_CONFIG")
    return None if setting is None else setting_bytes(str(setting)) // 1024


def _allocator(launch: Arguments) -> dict[str, bool]:
    """Key of a launch that sets expandable segments; empty for others."""
    setting = str(launch.environment.get("PYTORCH_CUDA_ALLOC_CONF") or launch.environment.get("PYTORCH_ALLOC_CONF") or "")
    return {"expandable_segments": True} if "expandable_segments:true" in setting.lower() else {}


def _recompute(launch: Arguments, host: dict[str, Any], letters: str) -> dict[str, Any]:
    granularity, modules, method, layers = (launch.value(f"recompute_{key}") for key in ("granularity", "modules", "method", "num_layers"))
    older, whole_experts, _ = map(launch.given, (*_OLDER_WORDS, "distribute_saved_activations"))
    if granularity is not None:
        for key in _OLDER_WORDS:
            launch.overruled(key, "--recompute-granularity decides")
    if granularity != "selective" and not older:
        launch.overruled("recompute_modules", "they are those of --recompute-granularity selective")
    if granularity != "full":
        launch.overruled("distribute_saved_activations", "it is of --recompute-granularity full")
    if granularity is None and (older or whole_experts):
        granularity, modules = "selective", ["core_attn"] * older + ["moe"] * whole_experts
    if granularity == "full":
        _full_recompute(launch, host, method, layers)
    elif granularity == "selective":
        named = _modules(launch, modules)
        core = "core_attn" in named and "A" in letters  # without an A layer, no block can have that policy
        others = [module for module in dict.fromkeys(named) if module in PRICED_MODULES and not (core and module == "core_attn")]
        if others:
            host["recompute_modules"] = others
        if core:
            return {"blocks": {"A": "selective"}}
    elif granularity is not None:
        launch.cannot("recompute_granularity", "it is full or selective")
    return {}


def _full_recompute(launch: Arguments, host: dict[str, Any], method: Any, layers: Any) -> None:
    if method not in ("uniform", "block"):
        launch.cannot("recompute_method", "full recompute is uniform or block", "uniform")
    if method == "block" and layers in (0, None):
        return  # of no layer
    host["recompute_num_layers"] = launch.whole("recompute_num_layers") if layers is not None else 1
    host |= {"recompute_method": method, **({key: True} if launch.given(key := "distribute_saved_activations") else {})}


def _modules(launch: Arguments, modules: Any) -> list[str]:
    named = re.findall(r"[a-z_]+", " ".join(map(str, modules)) if isinstance(modules, list) else str(modules or "core_attn"))
    for module in named:
        if module not in PRICED_MODULES:
            launch.cannot("recompute_modules", f"{module} is not priced; the modules that are priced: {', '.join(PRICED_MODULES)}")
    return named
