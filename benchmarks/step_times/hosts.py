"""Software of a published row as a spec's `host`, `precision.recipe`, `recompute` and `sharding`."""

from typing import Any

from megaplan.cost.step.frameworks import frameworks

Row = dict[str, Any]
FRAMEWORKS = {"bridge": "megatron-bridge", "mcore-plain": "megatron-lm", "mcore-ci": "megatron-lm-deterministic"}
NEMO_RELEASES = {"35a9aec": "24.11", "8f5cbb3": "25.01", "741c886": "25.02", "8a983f7": "25.05"}
"""Release of NeMo by the commit of NVIDIA/dgxc-benchmarking whose README has the table."""
LOW_HEADS = frozenset({"deepseek-v3", "gpt-oss-120b"})
"""Models whose whole-iteration recipes of Bridge set fp8_output_proj."""
LORA_RANK = 16
"""NVIDIA-NeMo/Megatron-Bridge and NVIDIA/NeMo, recipes of Llama 3 70B; NVIDIA-NeMo/Automodel, examples: peft.dim."""
PADDED_ROWS = {"nemotron3-super": "26.04", "nemotron3-ultra": "26.04", "gpt-oss-20b": "26.06"}
"""Models whose recipes of Bridge set moe_router_padding_for_quantization, and since which release."""
DROPPED = frozenset({("nemo", "gpt3-175b"), ("mcore-ci", "gpt3-7b")})
"""Framework and model of rows whose attention drops probabilities: gpt3_175b_hydra.yaml of NVIDIA/dgxc-benchmarking, and launches that
leave Megatron-LM's default."""
RECIPES = {"fp8": "fp8_current", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
MEGATRON = frozenset({"megatron-lm", "megatron-bridge", "nemo", "mlperf"})
"""Frameworks that run Megatron-Core and that `host.framework` names."""


def framework_of(row: Row) -> str:
    """The framework's name in the data file."""
    return FRAMEWORKS.get(row["framework"], row["framework"])


def release_of(row: Row) -> str | None:
    """The framework's release."""
    commit = row["source"].partition("@")[2].partition(":")[0]
    return row["release"] or (NEMO_RELEASES.get(commit) if row["framework"] == "nemo" else None)


def with_microbatches(row: Row) -> Row:
    """The row with torchtitan's microbatches, whose table states the batch of a rank alone: as many as pipeline ranks.

    Source: `build_pipeline_schedule` of `torchtitan/parallelisms/pipelining_utils.py` in December 2024.
    """
    ranks = row["pp"] or 1
    if row["framework"] != "torchtitan" or not 1 < ranks < row["nmb"]:
        return row
    return row | {"mbs": row["mbs"] * row["nmb"] // ranks, "nmb": ranks}


RECIPE_LAYOUTS: dict[str, dict[str, int]] = {
    "st0164": {"pp": 4, "vp": 5, "mbs": 1},
    "st0172": {"vp": 8},
    "st0175": {"tp": 4, "cp": 1},
    "st0233": {"mbs": 4},
    "st0234": {"mbs": 4},
    "st0240": {"mbs": 8},
    "st0256": {"ep": 64},
    "st0262": {"mbs": 1},
    "st0263": {"vp": 12, "mbs": 1},
}
"""Layouts that a table of Megatron-Bridge 25.11 or 26.02 prints otherwise than the recipe of its release, tag v0.2.0 or v0.3.0."""


def with_recipe(row: Row) -> Row:
    """The row with the layout of its release's recipe, which is the code that ran, if the table has the recipe's GPUs, batch and length."""
    given = row | RECIPE_LAYOUTS.get(row["id"], {})
    data = given["gpus"] // (given["tp"] * given["pp"] * given["cp"])
    return given | {"dp": data, "nmb": given["gbs"] // (given["mbs"] * data)} if row["id"] in RECIPE_LAYOUTS else row


def has_low_head(row: Row) -> bool:
    """True if the head multiplies in the recipe's dtype."""
    return "full" in row["cuda_graph"] and row["model"] in LOW_HEADS and row["framework"] == "bridge"


def has_padded_rows(row: Row) -> bool:
    """True if every rank fills its rows of an expert up to a multiple."""
    since = PADDED_ROWS.get(row["model"])
    return row["framework"] == "bridge" and row["precision"] != "bf16" and since is not None and (release_of(row) or "") >= since


def dropout_of(row: Row) -> float:
    """Share of the probabilities that attention drops."""
    return 0.1 if (row["framework"], row["model"]) in DROPPED else 0.0


def lora_of(row: Row) -> dict[str, Any] | None:
    """A row's adapters as a spec's `lora`.

    NeMo's and Megatron-Bridge's benchmarks set peft.target_modules to linear_qkv; Automodel's have match_all_linear.
    """
    if row["task"] != "lora":
        return None
    chosen = None if row["framework"] == "automodel" else ["q_proj", "k_proj", "v_proj"]
    return {"rank": LORA_RANK, "alpha": 2.0 * LORA_RANK, "families": chosen}


def launch_of(row: Row) -> dict[str, Any] | None:
    """The sections of a spec that say what ran a row; None for a framework that is not a host of specs."""
    name = framework_of(row)
    if lora_of(row) is not None:
        return None
    deterministic = name == "megatron-lm-deterministic"
    if name not in MEGATRON and not deterministic:
        return None
    graphs, given = row["cuda_graph"], row["recompute"]
    host: dict[str, Any] = {"name": "megatron", "tp_comm_overlap": bool(row["tp_overlap"]), "moe_overlap": bool(row["a2a_overlap"])}
    host |= {"attention_dropout": dropout_of(row), "hidden_dropout": dropout_of(row)}
    host |= {"deterministic_mode": True} if deterministic else {"framework": name}
    if release_of(row) and frameworks()[name].releases:
        host["release"] = release_of(row)
    if row["dispatcher"] in ("deepep", "hybridep"):
        host |= {"moe_dispatcher": "flex", "moe_flex_backend": row["dispatcher"]}
    elif row["arch"]["nE"]:
        host["moe_dispatcher"] = "alltoall"
    if "full" in graphs:
        host["cuda_graphs"] = "iteration"
    elif graphs:
        host |= {"cuda_graphs": "layers", "cuda_graph_modules": sorted(graphs)}
    if given.get("full") == 1.0:
        host["recompute_num_layers"] = 1
    modules = sorted(name for name, said in given.items() if said and name not in ("full", "sac_op", "core_attn"))
    if modules:
        host["recompute_modules"] = modules
    precision: dict[str, Any] = {"params": "bf16"}
    if row["precision"] != "bf16":
        recipe = {"name": RECIPES[row["precision"]], "attention": bool(row.get("fp8_attention")), "head": has_low_head(row)}
        precision["recipe"] = {key: value for key, value in recipe.items() if value}
    found: dict[str, Any] = {"host": host, "precision": precision, "optimizer": {"matrix": "adamw", "other": "adamw"}}
    if row["fsdp"]:
        host["model"] = "hybrid" if row["arch"]["nM"] else "gpt"
        found["sharding"] = {"reshard_after_forward": bool(row["fsdp"]["regather"])}
        precision["reduce"] = precision["grads"] = "bf16" if row["fsdp"]["red"] == 2 else "fp32"
    if given.get("core_attn") and given.get("full") != 1.0:
        found["recompute"] = {"blocks": {"A": "selective"}}
    return found
