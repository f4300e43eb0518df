"""Flavors of a fork, from the registry in its own tree (`torchtitan/models/NAME/__init__.py`), read from the syntax tree: nothing runs."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megaplan.importers.torchtitan.models import LLAMA3_VOCABULARY, QWEN3_VOCABULARY, Flavor
from megaplan.scalars import MAX_INT

MOST_FOLDERS, MOST_BYTES = 6, 2**20
VOCABULARIES = {"llama2": 32_000, "llama3": LLAMA3_VOCABULARY, "qwen3": QWEN3_VOCABULARY}
"""Tokens of the tokenizers that the models' own configurations name."""
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {ast.Div: operator.truediv, ast.Mult: operator.mul, ast.Add: operator.add}
_SIZES = ("dim", "n_layers", "n_heads")
_READ = {*_SIZES, "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "rope_theta", "head_dim", "hidden_dim", "qk_norm"}
_CHANGES_NOTHING = {"max_seq_len", "norm_eps", "depth_init", "eos_id", "rope_scaling_args"}


def fork_flavor(path: str, model: str, flavor: str) -> Flavor | None:
    """The dimensions of a flavor in the tree that a configuration belongs to; None if it is in none, or is no dense decoder.

    Args:
        path: Path of the configuration.
        model: Name of the model.
        flavor: Name of the flavor.
    """
    if model not in VOCABULARIES or not Path(path).is_file():
        return None
    for file in _registries(Path(path).resolve(), model):
        try:
            found = _arguments(ast.parse(file.read_text(encoding="utf-8")), model, flavor)
        except (SyntaxError, ValueError, RecursionError):
            continue
        if found is not None:
            return _flavor(found, model)
    return None


def _registries(path: Path, model: str) -> Iterator[Path]:
    for folder in list(path.parents)[:MOST_FOLDERS]:
        names = (f"torchtitan/models/{model}", f"torchtitan/models/{model.rstrip('0123456789')}", f"torchtitan/experiments/{model}")
        for file in (folder / name / "__init__.py" for name in (*names, *([""] if folder.name == model else []))):
            if file.is_file() and file.stat().st_size <= MOST_BYTES:
                yield file


def _arguments(tree: ast.Module, model: str, flavor: str) -> dict[str, Any] | None:
    """Keywords of the call behind a flavor's name, in a table that is named after the model."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        named = any(isinstance(target, ast.Name) and target.id.startswith(f"{model}_") for target in targets)
        table = getattr(node, "value", None)
        if named and isinstance(table, ast.Dict):
            for key, value in zip(table.keys, table.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == flavor and isinstance(value, ast.Call) and not value.args:
                    return {each.arg: _value(each.value) for each in value.keywords if each.arg is not None}
    return None


def _value(node: ast.expr) -> Any:
    """A constant, or a quotient, product or sum of numbers; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if all(isinstance(each, int | float) and 0 < abs(each) <= MAX_INT for each in (left, right)):
            return _OPERATORS[type(node.op)](left, right)
    return None


def _flavor(given: dict[str, Any], model: str) -> Flavor | None:
    others = {key for key, value in given.items() if key not in _READ | _CHANGES_NOTHING and value is not False}
    tied = given.get("enable_weight_tying", False)
    if (others - {"enable_weight_tying"}) or not all(isinstance(given.get(key), int) and 0 < given[key] <= MAX_INT for key in _SIZES):
        return None
    dim, blocks, heads = (given[key] for key in _SIZES)
    multiple, share = given.get("multiple_of", 256), given.get("ffn_dim_multiplier")
    width = int(8 * dim / 3) if share is None else int(share * int(8 * dim / 3))
    ffn = given.get("hidden_dim") or math.ceil(width / multiple) * multiple
    return Flavor(
        *(dim, blocks, heads, given.get("n_kv_heads") or heads, given.get("head_dim") or dim // heads, ffn),
        *(given.get("vocab_size") or VOCABULARIES[model], float(given.get("rope_theta", 10_000))),
        qk_norm=bool(given.get("qk_norm")),
        tied=bool(tied),
    )
