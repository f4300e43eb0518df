"""All that is neither architecture nor layout: dtypes, optimizers, recompute, host, device, serving and training of a random plan."""

from collections.abc import Sequence
from typing import Any

from megakernels.libraries import FLASH4, GENERATION, QUACK
from megaplan.devices import load_device
from megaplan.schedules.registry import PAIRED, SPLIT_BACKWARD
from megaplan.spec.host import RELEASED
from random_plans.choices import Draw, Scope, divisors

FP32, BF16 = "fp32", "bf16"
ROLES = ("params", "grads", "master", "moments", "reduce")
RATED = ("A", "M", "E", "R", "D", "G", "C", "head", "attention", "scan", "experts", "recurrence", "memory", "node", "network")
REFUSES_FULL = "EMG"
RESERVE = ("cuda_context", "nccl", "driver", "other")
RECIPES = ("bf16", "fp8", "mxfp8", "nvfp4")
PEAKS = ("fp32", "bf16", "fp16", "fp8", "fp4")


def precision_section(draw: Draw, scope: Scope, letters: str, *, pipelined: bool, megatron: bool) -> dict[str, Any]:
    """`precision`: mostly dtypes that megarun keeps; sometimes a pair that torch does not, which a plan must say."""
    if megatron:
        grads = draw.choice([FP32, BF16])
        return {"params": BF16, "grads": grads, "reduce": grads} if draw.chance(0.7) else {}
    made = draw.weighted({"default": 4, "fp32": 2, "narrow": 2, "bf16": 1, "kept": 3, "free": 0.6, "other": 0.6})
    written: dict[str, dict[str, Any]] = {
        "default": {} if draw.chance(0.5) else {"params": BF16},
        "fp32": dict.fromkeys(ROLES, FP32),
        "narrow": {"params": BF16, "grads": BF16, "reduce": BF16},
        "bf16": dict.fromkeys(ROLES, BF16),
    }
    if made in written:
        return written[made]
    precision: dict[str, Any] = {role: draw.choice([FP32, BF16]) for role in ROLES}
    if made == "other" and scope is Scope.ANY:
        precision |= {role: draw.choice(["fp16", *(["fp8"] if role == "params" else [])]) for role in ROLES if draw.chance(0.3)}
        if families := draw.some(sorted(set(letters))):
            precision["families"] = {letter: draw.choice([FP32, BF16, "fp16", "fp8"]) for letter in families}
    elif made != "free":
        precision["moments"] = precision["master"]
        if pipelined:
            precision["reduce"] = precision["grads"]
    return precision


def add_used_dtypes(draw: Draw, sections: dict[str, Any]) -> None:
    """fp16 for all parameters in use, or other dtypes for layers of some letters, where nothing is frozen."""
    precision = sections.get("precision", {})
    if "lora" in sections:
        return
    if "recipe" not in precision and precision.get("params", BF16) == BF16 and draw.chance(0.15):
        sections["precision"] = precision | {"params": "fp16"}
    if "families" not in precision and draw.chance(0.2):
        letters = sorted(set(sections["model"]["pattern"].upper()) - {"|"})
        own = {letter: draw.choice([FP32, BF16]) for letter in letters if draw.chance(0.5)}
        sections["precision"] = sections.get("precision", {}) | {"families": own}


def optimizer_section(draw: Draw) -> dict[str, Any]:
    """`optimizer`."""
    section: dict[str, Any] = {}
    draw.maybe(section, 0.6, matrix=lambda: draw.choice(["adamw", "adamw", "muon"]))
    draw.maybe(section, 0.2, newton_schulz_dtype=lambda: draw.choice([FP32, BF16, "fp16"]))
    draw.maybe(section, 0.15, newton_schulz_steps=lambda: draw.randint(1, 8))
    return section


def recompute_section(draw: Draw, letters: str, *, megatron: bool) -> dict[str, Any]:
    """`recompute`: E and M refuse full, and Megatron has no policy except attention's core."""
    present = sorted(set(letters))
    if megatron:
        return {"blocks": {"A": "selective"}} if "A" in present and draw.chance(0.3) else {}
    default = draw.weighted({"none": 4, "selective": 2, "full": 2})
    section: dict[str, Any] = {"default": default} if default != "none" or draw.chance(0.2) else {}
    blocks = {}
    for letter in present:
        refuses = letter in REFUSES_FULL
        if (refuses and default == "full") or draw.chance(0.25):
            blocks[letter] = draw.choice(["none", "selective", *([] if refuses else ["full"])])
    return section | ({"blocks": blocks} if blocks else {})


def device_section(draw: Draw) -> dict[str, Any]:
    """`device`."""
    section: dict[str, Any] = {}
    draw.maybe(section, 0.3, name="h200", per_node=lambda: draw.choice([1, 4, 8, 72]))
    draw.maybe(section, 0.15, efficiency_percent=lambda: {key: draw.randint(5, 100) for key in draw.sample(RATED, draw.randint(1, 4))})
    for key in ("launch_ns", "collective_latency_ns", "recurrence_step_ns"):
        draw.maybe(section, 0.1, **{key: draw.randint(0, 50_000)})
    draw.maybe(section, 0.1, capacity=lambda: draw.randint(2**34, 2**40), domain=lambda: draw.choice([2, 8, 64]))
    draw.maybe(section, 0.15, reserve=lambda: {item: draw.randint(0, 2**32) for item in draw.sample(RESERVE, draw.randint(1, 3))})
    draw.maybe(section, 0.1, peak_flops=lambda: {dtype: draw.randint(1, 10**16) for dtype in draw.sample(PEAKS, draw.randint(1, 3))})
    for key in ("memory_bytes_per_second", "node_bytes_per_second", "network_bytes_per_second"):
        draw.maybe(section, 0.1, **{key: draw.randint(10**9, 10**14)})
    draw.maybe(section, 0.1, reached=lambda: {dtype: draw.randint(1, 20) / 20 for dtype in draw.sample(RECIPES, draw.randint(1, 2))})
    if draw.chance(0.2):  # A100s cannot multiply in fp8, which a draw may contain
        section["name"] = draw.choice(["h100-sxm", "b200", "gb300", "mi300x"])
    return section


def serving_section(draw: Draw) -> dict[str, Any]:
    """`serving`."""
    section: dict[str, Any] = {"batch_size": draw.wide(1, 256), "context_length": draw.wide(1, 100_000)}
    draw.maybe(section, 0.5, kv_dtype=lambda: draw.choice([FP32, BF16, "fp16", "fp8"]))
    draw.maybe(section, 0.6, cache=lambda: draw.choice(["contiguous", "paged"]), block_size=lambda: draw.choice([1, 16, 100, 256]))
    return section


def add_serving_ranks(draw: Draw, section: dict[str, Any], mesh: dict[str, int], num_layers: int) -> None:
    """Degrees of `serving` that the model divides as it does the mesh's, and a prefix that sequences share."""
    if not section:
        return
    ep = mesh.get("ep", 1)
    usable = [tp for tp in divisors(mesh.get("tp", 1)) if ep % tp == 0]  # so that ETP does not divide the width of an expert
    draw.maybe(section, 0.4, tp=lambda: draw.choice(usable), pp=lambda: draw.randint(1, min(num_layers, 8)))
    if "tp" in section:
        section["ep"] = draw.choice([each for each in divisors(ep) if each % section["tp"] == 0])
    if section.get("cache") == "paged":
        draw.maybe(section, 0.5, shared_prefix=lambda: draw.randint(0, section["context_length"]))


def run_section(draw: Draw) -> dict[str, Any]:
    """`run`: each key in turn, as a number or with a unit."""
    values: dict[str, Sequence[Any]] = {
        "tokens": ["2T", 10**9], "mtbf": ["30000h", 5000], "price": [2.5], "power": ["700W", 1.2], "pue": [1.2], "carbon": [0.1, 0.0],
        "step": ["1.5s", 20], "storage": ["local", "parallel", "s3"], "node_bandwidth": ["5GB/s", 10**9], "total_bandwidth": ["1TB/s"],
        "save": ["async", "sync", "memory"], "interval": ["30min"], "detection": ["1min", 5], "restart": [90], "replacement": ["10min"],
        "repair": ["2d"], "spares": [0, 1, 4], "hangs": [0.2], "eval_every": [1000],
        "eval_tokens": ["8M", 10**6], "ramp_tokens": ["10M"], "ramp_from": [4096, 10**5], "sustained": [0.9, 1.0],
    }  # fmt: skip
    return {key: draw.choice(values[key]) for key in draw.sample(list(values), draw.randint(1, 8))}


def post_training_section(draw: Draw, seq_length: int, mesh: dict[str, int]) -> dict[str, Any]:
    """`post_training`: lengths that fit a row, a pool that groups divide, and the rest in turn."""
    prompt = max(1, seq_length // draw.choice([4, 8, 16]))
    limit = max(1, seq_length - prompt)
    mean = max(1, limit // 3)
    rollout: dict[str, Any] = {"engine": draw.choice(["vllm", "sglang"]), "prompt": prompt}
    shapes: list[dict[str, Any]] = [{"mean": mean}, {"mean": mean, "p99": limit, "max": limit}, {"p50": mean, "p90": limit}]
    rollout["response"] = draw.choice(shapes)
    split = draw.chance(0.4)
    values: dict[str, Sequence[Any]] = {
        "memory_fraction": [0.5, 0.8], "max_sequences": [16, 256], "batched_tokens": [2048], "dtype": [FP32, BF16, "fp16", "fp8"],
        "kv_dtype": [FP32, BF16, "fp16", "fp8"], "block_size": [16, 64], "graphs": [False, True],
        "prefix_cache": [False, True], "sleep": [0, 1, 2],
    }  # fmt: skip
    rollout |= {key: draw.choice(values[key]) for key in draw.sample(list(values), draw.randint(1, 6))}
    tp, pp = draw.choice(divisors(mesh.get("tp", 1))), draw.choice(divisors(mesh.get("pp", 1)))
    rollout |= {"tp": tp, "pp": pp}
    if mesh.get("ep", 1) % tp == 0:
        draw.maybe(rollout, 0.5, ep=tp)
    if split or mesh.get("dp_shard", 1) > 1:
        draw.maybe(rollout, 0.5, gpus=tp * pp)
    section: dict[str, Any] = {"kind": "rl", "prompts": draw.wide(1, 64), "samples": draw.wide(2, 16), "rollout": rollout}
    draw.maybe(section, 0.5, reference=lambda: draw.choice([{}, {"parameters": "1B"}, {"seconds": 2.0}]))
    draw.maybe(
        section,
        0.4,
        reward=lambda: draw.choice([{}, {"seconds": "30s"}, {"parameters": 10**9}]),
        critic=lambda: draw.choice([{}, {"parameters": "2B"}]),
    )
    policy: dict[str, Sequence[Any]] = {
        "updates": [1, 2], "log_probs": [True, False], "packing": [True, False], "log_prob_tokens": [1024], "logits": ["whole", "chunks"],
    }  # fmt: skip
    section["policy"] = {key: draw.choice(policy[key]) for key in draw.sample(list(policy), draw.randint(1, 5))}
    parts = ["parameters", "gradients", "optimizer", *(name for name in ("reference", "reward", "critic") if name in section)]
    section["offload"] = draw.sample(parts, draw.randint(1, len(parts)))
    if split:
        section |= {"placement": "split", "staleness": draw.choice([0, 1])}
        draw.maybe(rollout, 0.9, device=lambda: device_section(draw))
        if "device" in rollout:
            draw.maybe(rollout["device"], 0.1, peak_flops={"bf16": 10**15, "int8": 2 * 10**15})
    how = ["broadcast", "p2p", "disk", *([] if split else ["ipc"])]
    section["sync"] = {
        "how": draw.choice(how),
        "bucket_bytes": draw.choice(["1GiB", 2**28]),
        "staged": draw.chance(0.5),
        "merged": draw.chance(0.5),
    }
    draw.maybe(section, 0.3, host_memory="2TiB")
    draw.maybe(section, 0.3, pinned=True)
    return section


def training_section(draw: Draw) -> dict[str, Any]:
    """`training`; the phases of the rate fit into its steps."""
    steps = draw.wide(1, 100_000)
    section: dict[str, Any] = {"steps": steps}
    draw.maybe(section, 0.3, seed=lambda: draw.randint(0, 2**31), learning_rate=lambda: draw.choice([1e-4, 1e-2, 1.5e-3]))
    draw.maybe(section, 0.2, weight_decay=lambda: draw.choice([0.0, 0.05]), muon_learning_rate=0.02)
    draw.maybe(section, 0.3, gradient_clip=lambda: draw.choice([None, 0.5]))
    if draw.chance(0.6):
        kind = draw.choice(["constant", "cosine", "wsd"])
        rate: dict[str, Any] = {"kind": kind}
        draw.maybe(rate, 0.5, warmup_steps=lambda: draw.choice([None, 0, steps // 10]))
        if kind == "wsd":
            rate["decay_steps"] = max(1, steps // 5)
            draw.maybe(rate, 0.5, decay=lambda: draw.choice(["linear", "sqrt"]))
            if steps == 1:
                rate["warmup_steps"] = 0
        if kind != "constant":
            draw.maybe(rate, 0.5, final_fraction=lambda: draw.choice([0.0, 0.25, 1.0]))
        section["rate_schedule"] = rate
    if draw.chance(0.3):
        bad: dict[str, Any] = {}
        draw.maybe(bad, 0.5, skips=lambda: draw.randint(0, 5), rewinds=0, window_batches=lambda: draw.randint(0, 9))
        draw.maybe(bad, 0.4, spike=lambda: draw.choice([{}, {"factor": 3.5, "steps": 7}]))
        section["bad_steps"] = bad
    return section


def host_section(draw: Draw) -> dict[str, Any]:
    """`host` of a plan for megarun."""
    section: dict[str, Any] = {"name": "megarun"} if draw.chance(0.1) else {}
    draw.maybe(section, 0.6, kernels=lambda: draw.choice(["triton", "reference", "reference"]))
    return section


def add_allocator(draw: Draw, section: dict[str, Any], graphs: Draw | None) -> None:
    """Draw whether the segments of torch's allocator grow, and of what megarun makes CUDA graphs, which one process does."""
    draw.maybe(section, 0.3, expandable_segments=lambda: draw.choice([True, False]))
    if graphs is not None:
        graphs.maybe(section, 0.3, cuda_graphs=lambda: graphs.choice([None, "none", "microbatch", "step"]))


def add_offload(draw: Draw, sections: dict[str, Any]) -> None:
    """Draw a fraction of optimizer state in host memory, whose update is not recorded, and the links to that memory."""
    host = sections["host"]
    if host.get("cuda_graphs") != "step":
        draw.maybe(host, 0.3, optimizer_offload=lambda: draw.choice([1.0, 1.0, 0.5, draw.randint(1, 99) / 100]))
    rollout = sections.get("post_training", {}).get("rollout", {})
    for holder in (sections, *sections.get("pools", ()), rollout):
        if "device" in holder:
            draw.maybe(holder["device"], 0.2, host_bytes_per_second=lambda: draw.randint(10**9, 10**12))
            if draw.chance(0.2):
                holder["device"].setdefault("efficiency_percent", {})["host"] = draw.randint(5, 100)


def add_kept_on_host(draw: Draw, sections: dict[str, Any]) -> None:
    """Draw letters of layers whose kept tensors are in host memory, where these are no other layer's and no half of a backward's."""
    model, host, attention = sections["model"], sections["host"], sections["model"].get("attention", {})
    shares = model.keys() & {"streams", "attention_residuals", "parallel_layers"} or attention.keys() & {"indexer", "shared_keys"}
    shares = shares or model.get("features", {}).keys() & {"relation_bias", "layer_embeddings"}
    if shares or host.get("moe_overlap") or host.get("cuda_graphs") not in (None, "none"):
        return
    if sections["schedule"]["kind"] in SPLIT_BACKWARD or not draw.chance(0.15):
        return
    recompute = sections.get("recompute", {})
    policies = {letter: recompute.get("blocks", {}).get(letter, recompute.get("default", "none")) for letter in "AEDRCMG"}
    letters = set(str(model["pattern"]).upper()) & policies.keys()
    host["activation_offload"] = draw.some(sorted(each for each in letters if each not in "MG" or policies[each] == "none"))


def add_libraries(draw: Draw, sections: dict[str, Any]) -> None:
    """Draw the optional packages of kernels, which run on Hopper alone."""
    host, device = sections["host"], sections.get("device", {}).get("name", "h200")
    if host.get("kernels", "triton") == "triton" and load_device(device).generation == GENERATION:
        draw.maybe(host, 0.3, libraries=lambda: draw.choice([[FLASH4], [QUACK], [FLASH4, QUACK]]))


def add_dispatcher(draw: Draw, sections: dict[str, Any]) -> None:
    """Draw the way of tokens to experts, in a plan for megarun whose experts are spread over ranks or cut."""
    if sections["mesh"].get("ep", 1) * sections["mesh"].get("etp", 1) > 1:
        draw.maybe(sections["host"], 0.4, moe_dispatcher=lambda: draw.choice([None, "alltoall", "allgather", "allgather"]))


def add_turns(draw: Draw, sections: dict[str, Any]) -> None:
    """Draw turns of pairs, in a plan for megarun with pairs whose rows are sent to other ranks."""
    moves = sections["mesh"].get("ep", 1) > 1 and sections["host"].get("moe_dispatcher") != "allgather"
    moves &= sections["schedule"].get("kind") in PAIRED and "E" in str(sections["model"]["pattern"])
    if moves and not sections.get("sharding", {}).get("reshard_after_forward"):
        draw.maybe(sections["host"], 0.6, moe_overlap=True)


def megatron_section(
    draw: Draw, letters: str, groups: Sequence[int], *, gpt: bool, adamw: bool, selective: bool, windowed: bool
) -> dict[str, Any]:
    """`host` of a plan for Megatron-Core; `groups` are numbers of microbatches that a virtual stage may take in turn."""
    section: dict[str, Any] = {"name": "megatron", "model": "gpt"} if gpt else {"name": "megatron"}
    draw.maybe(section, 0.1, model=lambda: section.get("model", "hybrid"))
    choices: dict[str, tuple[Any, ...]] = {
        "attention_backend": ("flash", "fused") if windowed else ("flash", "fused", "unfused"),
        "cross_entropy": ("unfused", "native", "te", "te_fp32"),
        "hidden_dropout": (0.0, 0.1, 0.3),
        "attention_dropout": (0.0, 0.1, 0.2),
        "cublas_workspace_kib": (None, 0, 8_192, 32_768),
        "moe_dispatcher": ("allgather", "alltoall", "flex"),
        "moe_flex_backend": ("deepep", "hybridep"),
        "fragmentation_percent": (0, 5, 20),
    }
    flags: tuple[str, ...] = (
        "wgrad_fusion",
        "attention_mask",
        "distributed_optimizer",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_overlap",
    )
    flags += ("fused_squared_relu", "tp_comm_overlap", "deterministic_mode", "mtp_repeated")
    choices |= dict.fromkeys(flags, (True, False))
    for key, values in choices.items():
        draw.maybe(section, 0.3, **{key: draw.choice(values)})
    if adamw:
        draw.maybe(section, 0.3, precision_aware_optimizer=True)
        if "precision_aware_optimizer" in section:
            section.pop("distributed_optimizer", None)
    modules = ["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", *([] if section.get("moe_overlap") else ["moe"])]
    if draw.chance(0.3):
        section["recompute_modules"] = draw.sample(modules, draw.randint(1, 5))
    elif not selective and draw.chance(0.3):
        section["recompute_num_layers"] = draw.randint(1, max(1, len(letters) // 2))
    draw.maybe(section, 0.3, microbatch_group_size=lambda: draw.choice(groups))
    return section


def add_layout(draw: Draw, document: dict[str, Any]) -> None:
    """Draw whole matrices in the shards of Muon's buffer, for a Megatron-Core plan that may have them."""
    host, moe = document["host"], document["model"].get("moe", {})
    shards = host.get("distributed_optimizer", True) and document["mesh"].get("dp_replicate", 1) == 1
    plain = not moe.get("bias") and not document.get("precision", {}).get("recipe", {}).get("param_gather")
    if document.get("optimizer", {}).get("matrix", "muon") == "muon" and shards and plain:
        draw.maybe(host, 0.5, layer_wise_layout=True)


def add_single(draw: Draw, document: dict[str, Any]) -> None:
    """Give a Megatron-Core plan fp32 for all roles, without the parts that it has in 16 bits alone."""
    host, model, attention = document["host"], document["model"], document["model"].get("attention", {})
    beyond = "recipe" in document.get("precision", {}) or document["mesh"].get("cp", 1) > 1 or "linear_attention" in model
    if beyond or {"window_size", "indexer"} & attention.keys() or not draw.chance(0.15):
        return
    document["precision"] = dict.fromkeys(ROLES, FP32)
    for key in ("precision_aware_optimizer", "exp_avg_sq_dtype", "optimizer_recipe", "optimizer_offload", "moe_overlap"):
        host.pop(key, None)
    host.update({"attention_backend": "unfused"} if "attention_backend" in host else {})
    if host.get("moe_dispatcher") == "flex":
        host["moe_dispatcher"] = "alltoall"


def add_framework(draw: Draw, section: dict[str, Any]) -> None:
    """Settings of a Megatron-Core plan that change its time alone: the framework that runs it, and which transfers overlap."""
    draw.maybe(section, 0.3, framework=lambda: draw.choice(["megatron-lm", "megatron-bridge", "nemo", "mlperf"]))
    if section.get("framework") in RELEASED:
        draw.maybe(section, 0.5, release=lambda: draw.choice(["25.04", "26.04"]))
    draw.maybe(section, 0.2, dp_comm_overlap=lambda: draw.chance(0.5))


def add_own_modules(draw: Draw, document: dict[str, Any]) -> None:
    """Give a plan of Megatron's own modules what forks of them have: kernels of attention, shared checkpoints, layers side by side."""
    host, model, mesh = document["host"], document["model"], document["mesh"]
    if host.get("name") != "megatron":
        return
    if mesh.get("tp", 1) > 1 and "recompute_num_layers" in host and "moe" not in model:
        draw.maybe(host, 0.4, sequence_parallel=False, distribute_saved_activations=True)
    if host.get("transformer_impl") != "local":
        return
    draw.maybe(host, 0.3, attention_backend="flash", flash_version=lambda: draw.choice([1, 2]))
    draw.maybe(host, 0.3, rope_fusion=lambda: draw.chance(0.5))
    draw.maybe(host, 0.3, all_reduce_gradients=True)
    if "release" not in host:
        draw.maybe(host, 0.4, framework="gpt-neox")
    pairs = host.get("model") == "gpt" and set(model["pattern"].upper()) == {"A", "D"} and model["pattern"].startswith("AD")
    if pairs and "num_layers" in model and "mtp" not in model.get("features", {}):
        draw.maybe(model, 0.5, parallel_layers=list(range(1, model["num_layers"], 2)))
