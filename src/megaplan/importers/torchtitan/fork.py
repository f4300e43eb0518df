"""Flavors of a fork, from the registry in its own tree (`torchtitan/models/NAME/__init__.py`), read from the syntax tree: nothing runs.

A table by flavor has arguments of the model (2024 and 2025), its configuration with those of a layer inside (March 2026), or the function
that makes it and gives the sizes to one that builds all layers (July 2026).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaplan.importers.torchtitan.models import LLAMA3_VOCABULARY, QWEN3_VOCABULARY, Experts, Flavor
from megaplan.importers.torchtitan.registry_file import Made, Reader
from megaplan.scalars import MAX_INT

MOST_FOLDERS, MOST_BYTES = 6, 2**20
VOCABULARIES = {"llama2": 32_000, "llama3": LLAMA3_VOCABULARY, "qwen3": QWEN3_VOCABULARY, "deepseek_v3": 102_400}
"""Tokens of the tokenizers that the models' own configurations name."""
_SIZES = ("dim", "n_layers", "n_heads")
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_EXPERTS = {"num_experts", "num_shared_experts", "top_k", "score_func", "route_norm", "route_scale", "score_before_experts"}
_READ = {
    *_SIZES, *_LATENT, *_EXPERTS, "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "rope_theta", "head_dim", "hidden_dim",
    "qk_norm", "moe_hidden_dim", "moe_enabled", "n_dense_layers", "q_lora_rank", "enable_weight_tying",
}  # fmt: skip
_SAME = {
    "inter_dim": "hidden_dim", "dense_hidden_dim": "hidden_dim", "moe_inter_dim": "moe_hidden_dim", "theta": "rope_theta",
    "router_top_k": "top_k", "router_score_func": "score_func", "router_route_norm": "route_norm", "router_route_scale": "route_scale",
    "q_norm": "qk_norm",
}  # fmt: skip
"""Other names of the same sizes."""
_OF_EXPERTS = {
    "num_experts": 8, "num_shared_experts": 1, "top_k": 1, "score_func": "sigmoid", "route_norm": False, "score_before_experts": True
}  # fmt: skip
"""Defaults of the classes of experts."""
_INSIDE = ("layer", "layers", "attention", "feed_forward", "moe", "moe_args", "router", "rope")
"""Fields with sizes inside."""
_CHANGES_NOTHING = {
    "max_seq_len", "norm_eps", "depth_init", "eos_id", "rope_scaling_args", "mscale", "attn_mask_type", "use_flex_attn", "attn_backend",
    "norm", "tok_embeddings", "lm_head", "output", "attention_norm", "ffn_norm", "fuse_qkv", "moe_comm_backend", "tp_gemm_backend",
    "non_blocking_capacity_factor", "rope_backend", "mask_type", "k_norm", "kv_norm", "load_balance_coeff", "use_grouped_mm", "mtp_layers",
    "original_seq_len", "rope_factor", "beta_fast", "beta_slow", "num_mtp_layers", "param_init", "inner_attention",
}  # fmt: skip


def fork_flavor(path: str, model: str, flavor: str) -> Flavor | None:
    """The dimensions of a flavor in the tree that a configuration belongs to; None if it is in none, or no decoder that is read.

    Args:
        path: Path of the configuration.
        model: Name of the model.
        flavor: Name of the flavor.
    """
    if model not in VOCABULARIES or not Path(path).is_file():
        return None
    for file in _registries(Path(path).resolve(), model):
        try:
            made = _made(ast.parse(file.read_text(encoding="utf-8")), model, flavor)
        except (SyntaxError, ValueError, RecursionError):
            continue
        if made is not None:
            sizes = _sizes(made, "")
            return None if sizes is None else _flavor(sizes, model)
    return None


def stated_flavor(made: Made, model: str) -> Flavor | None:
    """The dimensions of a configuration of one of torchtitan's own models; None if it is of another, or a size is not known."""
    sizes = _sizes(made, "") if model in VOCABULARIES else None
    return None if sizes is None else _flavor(sizes, model)


def _registries(path: Path, model: str) -> Iterator[Path]:
    for folder in list(path.parents)[:MOST_FOLDERS]:
        names = (f"torchtitan/models/{model}", f"torchtitan/models/{model.rstrip('0123456789')}", f"torchtitan/experiments/{model}")
        for file in (folder / name / "__init__.py" for name in (*names, *([""] if folder.name == model else []))):
            if file.is_file() and file.stat().st_size <= MOST_BYTES:
                yield file


def _made(tree: ast.Module, model: str, flavor: str) -> Made | None:
    """The call behind a flavor's name, in a table that is named after the model."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names = [target.id.replace("_", "") for target in targets if isinstance(target, ast.Name)]
        table = getattr(node, "value", None)
        if any(name.startswith(model.replace("_", "")) for name in names) and isinstance(table, ast.Dict):
            for key, value in zip(table.keys, table.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == flavor:
                    reader = Reader(tree, builds_layers=True)
                    is_function = isinstance(value, ast.Name) and value.id in reader.functions
                    found = reader.call(value.id, [], {}) if is_function and isinstance(value, ast.Name) else reader.value(value, {})
                    return found if isinstance(found, Made) else None
    return None


def _sizes(made: Made, of: str) -> dict[str, Any] | None:
    """Sizes by their names, of a call and of those inside it; None if a field is not known. `of` is the field that the call is."""
    found: dict[str, Any] = {}
    for given, value in made.given.items():
        key = "moe_hidden_dim" if of == "moe" and given == "hidden_dim" else _SAME.get(given, given)
        if key in _INSIDE and isinstance(value, Made):
            inner = _sizes(value, given)
            if inner is None:
                return None
            found = inner | found
        elif of == "rope":
            found |= {key: value} if key == "rope_theta" else {}
        elif key == "qk_norm":
            found[key] = isinstance(value, Made) or bool(value)
        elif key in _READ:
            found[key] = _feed_forward_width(value) if isinstance(value, Made) else value
        elif key not in _CHANGES_NOTHING and value not in (False, None, 0):
            return None
    if of in ("moe", "moe_args"):
        found = _OF_EXPERTS | found
    return found


def _feed_forward_width(made: Made) -> int | None:
    """The width that `compute_ffn_hidden_dim` gives."""
    dim = made.positional[0] if made.positional else made.given.get("dim")
    if made.name.rpartition(".")[2] != "compute_ffn_hidden_dim":
        return None
    return _rounded(dim, made.given.get("multiple_of", 256), made.given.get("ffn_dim_multiplier"))


def _rounded(dim: Any, multiple: Any, share: Any) -> int | None:
    if not _is_size(dim) or not _is_size(multiple) or not (share is None or isinstance(share, int | float)):
        return None
    width = int(8 * dim / 3) if share is None else int(share * int(8 * dim / 3))
    return int(math.ceil(width / multiple) * multiple)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_INT


def _flavor(given: dict[str, Any], model: str) -> Flavor | None:
    latent, routed = model == "deepseek_v3", given.get("moe_enabled", "num_experts" in given)
    if not all(_is_size(given.get(key)) for key in _SIZES) or any(given.get(key, width) != width for key, width in _LATENT.items()):
        return None
    experts = _experts(given, model) if routed else None
    dim, blocks, heads = given["dim"], given["n_layers"], given["n_heads"]
    sizes = _widths(given, model)
    theta = given.get("rope_theta", 1_000_000 if model == "qwen3" else 10_000)
    if not all(map(_is_size, sizes)) or not isinstance(theta, int | float) or (experts is None and (latent or routed)):
        return None
    return Flavor(
        dim,
        blocks,
        heads,
        sizes[0],
        sizes[1],
        sizes[2],
        vocab=sizes[3],
        rope_theta=float(theta),
        qk_norm=given.get("qk_norm", model == "qwen3"),
        tied=given.get("enable_weight_tying") is True,
        experts=experts,
        dense=given.get("n_dense_layers", 1) if latent else 0,
        q_rank=given.get("q_lora_rank") or 0 if latent else None,
    )


def _widths(given: dict[str, Any], model: str) -> tuple[Any, Any, Any, Any]:
    """Key heads, width of a head and of the MLP, and vocabulary, where they are known."""
    dim, heads = given["dim"], given["n_heads"]
    head_dim = 192 if model == "deepseek_v3" else given.get("head_dim") or (128 if model == "qwen3" else dim // heads)
    ffn = given.get("hidden_dim") or _rounded(dim, given.get("multiple_of", 256), given.get("ffn_dim_multiplier"))
    return given.get("n_kv_heads") or heads, head_dim, ffn, given.get("vocab_size") or VOCABULARIES[model]


def _experts(given: dict[str, Any], model: str) -> Experts | None:
    """The experts of a block; None if scores multiply rows before them, or a size is not known."""
    shared = given.get("num_shared_experts", 0)
    number, top_k, width = (given.get(key, 0) for key in ("num_experts", "top_k", "moe_hidden_dim"))
    if given.get("score_before_experts") or not all(map(_is_size, (number, top_k, width))) or not (shared == 0 or _is_size(shared)):
        return None
    score, scale = given.get("score_func", "softmax"), given.get("route_scale", 1.0)
    normed = given.get("route_norm", model == "qwen3")
    if score not in ("softmax", "sigmoid") or not isinstance(scale, int | float) or not isinstance(normed, bool):
        return None
    return Experts(number, top_k, width, shared * width, score, normed, float(scale))
