"""Greedy reduction of a failing spec to a small one that fails in the same class; the changes that remove most come first."""

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

from megaplan.errors import MegaplanError
from megaplan.families.registry import FAMILIES
from megaplan.plan.make import make_plan
from megaplan.spec.load import spec_from_document

Spec = dict[str, Any]
Fails = Callable[[Spec], bool]
Change = tuple[str, Spec]
"""One change, in words that do not depend on the other keys, and the spec after it."""
Simplify = Callable[[Spec], Iterator[Change]]
AXES = ("dp_replicate", "cp", "etp", "ep", "tp", "dp_shard", "vpp", "pp")
NEEDED = {
    "attention": ("kind", "num_heads", "num_kv_heads", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    "mamba": ("kind",),
    "moe": ("num_experts", "top_k", "ffn_hidden_size"),
    "recurrent": ("kind", "num_heads", "key_dim", "value_dim"),
    "mlp": ("ffn_hidden_size",),
}
OPTIONAL = (
    *("training", "serving", "device", "data", "model__norm_eps", "split", "schedule__steps_per_update", "optimizer", "sharding"),
    *("recompute", "host", "model__features", "mesh__vocab_parallel", "model__tie_embeddings", "precision"),
)
"""Parts that a spec may lack, the least likely to matter first."""
KEPT = {*NEEDED["attention"], "v_head_dim"}


def shrink(document: Spec, fails: Fails, seconds: float) -> Spec:
    """The smallest spec found in the time given.

    Args:
        document: A spec that fails.
        fails: True if a spec fails in the same class.
        seconds: Wall time to spend; a spec under test is finished.
    """
    end, best = time.monotonic() + seconds, {**copy.deepcopy(document), "name": "mini"}
    tried: set[str] = set()
    changed = True
    while changed:
        changed = False
        for simplify in SIMPLIFICATIONS:
            given_up: set[str] = set()  # each change is tried once per round
            while (found := _first(simplify, best, fails, tried, given_up, end)) is not None:
                best, changed = found, True
            if time.monotonic() > end:
                return best
    return best


def _first(simplify: Simplify, best: Spec, fails: Fails, tried: set[str], given_up: set[str], end: float) -> Spec | None:
    """The first candidate that still fails."""
    for change, candidate in simplify(best):
        key = repr(candidate)
        if change in given_up or candidate == best or key in tried or not _plans(candidate):
            continue
        if time.monotonic() > end:
            return None
        tried.add(key)
        if fails(candidate):
            return candidate
        given_up.add(change)
    return None


def _plans(document: Spec) -> bool:
    try:
        make_plan(spec_from_document(document))
    except MegaplanError:
        return False
    except Exception:
        return True  # the failure that is searched may be a crash
    return True


def _changed(document: Spec, **sections: Any) -> Change:
    """A copy with dotted keys (`__` for the dot) replaced, or removed where the value is None."""
    spec = copy.deepcopy(document)
    for key, value in sections.items():
        *path, last = key.split("__")
        section = spec
        for step in path:
            section = section.setdefault(step, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return repr(sections), _fitting(spec)


def _fit_keys(attention: Spec, places: list[int]) -> None:
    """Remove readers of keys, and their source, that are not layers of attention."""
    groups = attention.pop("shared_keys", [])
    for group in groups:
        group["layers"] = [layer for layer in group["layers"] if layer in places]
    if kept := [group for group in groups if group["source"] in places and group["layers"]]:
        attention["shared_keys"] = kept


def _fitting(spec: Spec) -> Spec:
    """Remove everything that refers to a layer, slot or letter that no longer exists; keep the rest."""
    model = spec["model"]
    letters = model["pattern"].upper().replace("|", "")
    letters = (letters * model["num_layers"])[: model["num_layers"]]
    for letter, family in FAMILIES.items():
        if letter not in letters:
            model.pop(family.section, None)
    attention = model.get("attention", {})
    places = [index for index, letter in enumerate(letters) if letter == "A"]
    indexer = attention.get("indexer")
    _fit_keys(attention, places)
    for owner, key in ((attention, "nope_layers"), (attention, "full_layers"), (indexer or {}, "layers")):
        if key in owner:
            owner[key] = [layer for layer in owner[key] if layer in places] or ([] if key != "layers" else places)
    for window in attention.get("windows", []):
        window["layers"] = [layer for layer in window["layers"] if layer in places]
    if indexer is not None and "shared_layers" in indexer:
        first, own = min(indexer["layers"], default=len(letters)), indexer["layers"]
        indexer["shared_layers"] = [layer for layer in indexer["shared_layers"] if layer in places and layer > first and layer not in own]
        if not indexer["shared_layers"]:
            del indexer["shared_layers"]
    for section, key in (("recompute", "blocks"), ("precision", "families")):
        if key in spec.get(section, {}):
            spec[section][key] = {letter: value for letter, value in spec[section][key].items() if letter in letters}
    features = model.get("features", {})
    if "A" not in letters:
        features.pop("mtp", None)
        features.pop("relation_bias", None)
    if "features" in model and not features:
        del model["features"]
    return {key: value for key, value in spec.items() if value != {} or key == "model"}


def _bundles(document: Spec) -> Iterator[Change]:
    """Many keys at once: what no byte depends on, then all that is optional, then halves of it."""
    yield _changed(document, training=None, serving=None, device=None, pools=None)
    keys = [key for key in OPTIONAL if _has(document, key)]
    while len(keys) > 1:
        yield _changed(document, **dict.fromkeys(keys))
        half = len(keys) // 2
        yield _changed(document, **dict.fromkeys(keys[half:]))
        keys = keys[:half]


def _has(document: Spec, key: str) -> bool:
    section: Any = document
    for step in key.split("__"):
        if step not in section:
            return False
        section = section[step]
    return True


def _sections(document: Spec) -> Iterator[Change]:
    for key in OPTIONAL:
        yield _changed(document, **{key: None})


def _mesh(document: Spec) -> Iterator[Change]:
    mesh = document.get("mesh", {})
    if mesh.get("pp", 1) > 1:
        plain = {"kind": "1f1b", "num_microbatches": 1}
        yield _changed(document, split=None, mesh__pp=None, mesh__vpp=None, schedule=plain, model__pattern=_without_bars(document))
    for axis in AXES:
        degree = mesh.get(axis, 1)
        for smaller in (1, 2, degree // 2, degree - 1):
            if 0 < smaller < degree and axis not in ("pp", "vpp"):
                yield _changed(document, **{f"mesh__{axis}": smaller if smaller > 1 else None})
        if axis in mesh and degree == 1:
            yield _changed(document, **{f"mesh__{axis}": None})


def _without_bars(document: Spec) -> str:
    return str(document["model"]["pattern"]).replace("|", "")


def _schedule(document: Spec) -> Iterator[Change]:
    mesh, schedule = document.get("mesh", {}), document.get("schedule", {})
    pp = mesh.get("pp", 1)
    counts = sorted({1, 2, pp, 2 * pp, schedule.get("num_microbatches", 1) - 1} - {0})
    for count in counts:
        if count < schedule.get("num_microbatches", 1):
            yield _changed(document, schedule__num_microbatches=count)
    if pp > 2:
        for kept in (document.get("schedule", {}).get("kind"), "1f1b"):
            for smaller in (2, pp - 1):
                vpp = mesh.get("vpp") if kept != "1f1b" else None
                for count in (smaller, 2 * smaller):
                    own = {"kind": kept, "num_microbatches": count}
                    yield _changed(
                        document, split=None, mesh__pp=smaller, mesh__vpp=vpp, schedule=own, model__pattern=_without_bars(document)
                    )
    if pp > 1 and schedule.get("kind") != "1f1b":
        for kind in ("1f1b", "gpipe"):
            own = {**schedule, "kind": kind, "num_microbatches": max(pp, schedule.get("num_microbatches", 1))}
            yield _changed(document, split=None, mesh__vpp=None, schedule=own, model__pattern=_without_bars(document))


def _layers(document: Spec) -> Iterator[Change]:
    model, mesh = document["model"], document.get("mesh", {})
    bare = _without_bars(document)
    layers = (bare * model["num_layers"])[: model["num_layers"]]
    slots = mesh.get("pp", 1) * mesh.get("vpp", 1)
    for letter in dict.fromkeys(layers):
        for count in sorted({slots, 2 * slots, model["num_layers"]}):
            if count <= model["num_layers"]:
                yield _changed(document, split=None, model__pattern=letter, model__num_layers=count)
    for count in sorted({slots, 2, 2 * slots, model["num_layers"] // 2, model["num_layers"] - 1}):
        if slots <= count < model["num_layers"] and count > 0:
            for start in (0, len(layers) - count):
                yield _changed(document, split=None, model__pattern=layers[start : start + count], model__num_layers=count)
    for letter in dict.fromkeys(layers):
        fewer = layers.replace(letter, "")
        if len(fewer) >= slots and fewer:
            yield _changed(document, split=None, model__pattern=fewer, model__num_layers=len(fewer))
    if "|" in model["pattern"]:
        yield _changed(document, split=None, model__pattern=bare)
    if bare != bare.upper():
        yield _changed(document, model__pattern=model["pattern"].upper())


def _features(document: Spec) -> Iterator[Change]:
    model = document["model"]
    for name in model.get("features", {}):
        yield _changed(document, **{f"model__features__{name}": None})


def _batch(document: Spec) -> Iterator[Change]:
    batch = document["batch"]
    if batch["micro_batch_size"] > 1:
        yield _changed(document, batch__micro_batch_size=1)
    for length in (64, 256, 1024, batch["seq_length"] // 2):
        if 0 < length < batch["seq_length"]:
            yield _changed(document, batch__seq_length=length)


def _keys(document: Spec) -> Iterator[Change]:
    """Optional keys of what is left, one by one."""
    for name in ("precision", "optimizer", "recompute", "split", "host", "sharding", "schedule", "data", "device", "serving", "training"):
        for key in document.get(name, {}):
            if name != "schedule" or key != "kind":
                yield _changed(document, **{f"{name}__{key}": None})
    for section, needed in NEEDED.items():
        for key in document["model"].get(section, {}):
            if key not in needed and key not in KEPT:
                yield _changed(document, **{f"model__{section}__{key}": None})
    for section, keys in document["model"].get("features", {}).items():
        for key in keys:
            yield _changed(document, **{f"model__features__{section}__{key}": None})


def _sizes(document: Spec) -> Iterator[Change]:
    """Numbers of the model: powers of two, then halves."""
    model = document["model"]
    yield from _smaller(document, "model__hidden_size", model["hidden_size"], (256, 512, 1024, 2048))
    yield from _smaller(document, "model__vocab_size", model["vocab_size"], (256, 1024, 4096, 32768))
    for section in (*NEEDED, "features"):
        for key, value in model.get(section, {}).items():
            if isinstance(value, dict):
                for inner, number in value.items():
                    if type(number) is int:
                        yield from _smaller(document, f"model__{section}__{key}__{inner}", number, (1, 2, 8, 64))
            elif type(value) is int:
                yield from _smaller(document, f"model__{section}__{key}", value, (1, 2, 4, 16, 64, 256, 1024))


def _smaller(document: Spec, key: str, value: int, targets: tuple[int, ...]) -> Iterator[Change]:
    for target in targets:
        if target < value:
            yield _changed(document, **{key: target})


SIMPLIFICATIONS: tuple[Simplify, ...] = (_bundles, _mesh, _schedule, _layers, _batch, _sections, _features, _keys, _sizes)
