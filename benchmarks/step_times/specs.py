"""A published row as a spec: the model, mesh, batch, precision and device that users write. What only a framework knows stays beside it."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from megaplan.errors import MegaplanError
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec
from megaplan.spec.pattern import parse_pattern
from step_times.hosts import launch_of, lora_of

Row = dict[str, Any]
DEVICES = {"A100_40GB": "a100-40gb", "A100_80GB": "a100-80gb", "H100": "h100-sxm", "H100-500W": "h100-sxm-500w"}
ADAPTERS = {("llm-foundry", "A100_80GB"): 12_500_000_000}
"""Bytes per second of an adapter where a cluster is not the data sheet's: llm-foundry's README, 800 Gb/s for eight A100 of 80 GB."""
_FOUND: dict[str, Spec | str] = {}


def device_name(row: Row) -> str:
    """The device's name in the data file."""
    return DEVICES.get(row["device"], row["device"].lower())


def adapter(row: Row) -> int | None:
    """Bytes per second of the cluster's adapters where they are not the data file's."""
    return ADAPTERS.get((row["framework"], row["device"]))


def spec_of(row: Row) -> Spec | str:
    """The row's spec, or the first reason why specs cannot say it yet; the same answer for a row's id each time."""
    known = row.get("id")
    if known not in _FOUND:
        reason = _unsayable(row)
        _FOUND[known] = reason or _checked(row)
    return _FOUND[known]


def spans(spec: Spec) -> tuple[tuple[int, int], ...]:
    """Layers of each slot."""
    return parse_pattern(spec.model.pattern, spec.model.num_layers).spans or ((0, spec.model.num_layers),)


def owners(spec: Spec) -> list[int]:
    """The pipeline rank of each slot, in loops."""
    return [slot % spec.mesh.pp for slot in range(spec.mesh.pp * spec.mesh.vpp)]


def _unsayable(row: Row) -> str | None:
    arch = row["arch"]
    reasons = {
        "blocks of a hybrid that do not divide into alike slots": arch["nM"] and any(arch[f"n{letter}"] % _slots(row) for letter in "MEAD"),
        "layers that do not divide into whole chunks": not arch["nM"] and _pairs(row) is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _checked(row: Row) -> Spec | str:
    """The spec with the software that ran the row, if specs can state it and no rule refuses it, otherwise without."""
    plain, launch = document(row), launch_of(row)
    if launch is not None:
        try:
            return spec_from_document(plain | launch)
        except MegaplanError:
            pass
    try:
        return spec_from_document(plain)
    except MegaplanError as error:
        codes = sorted({found.code for found in error.diagnostics if found.severity == "error"})
        return f"a rule of specs refuses the layout ({', '.join(codes)})"


def document(row: Row) -> dict[str, Any]:
    """The spec file of a row."""
    arch, mesh = row["arch"], {axis: max(1, int(row[key] or 1)) for axis, key in _AXES.items()}
    data, cp, tp = mesh.pop("dp"), mesh["cp"], mesh["tp"]
    activation = "swiglu" if arch["gated"] else "gelu"
    letters = _letters(arch, _slots(row))
    model: dict[str, Any] = {"pattern": letters, "num_layers": len(letters), "hidden_size": arch["h"], "vocab_size": arch["V"]}
    model |= {"tie_embeddings": bool(arch["tied"]), "attention": _attention(arch)}
    if "D" in letters:
        model["mlp"] = {"ffn_hidden_size": arch["ffn"], "activation": activation}
    if "E" in letters:
        shared = {"shared_ffn_hidden_size": arch["shared"] or 0}
        model["moe"] = {"num_experts": arch["E"], "top_k": arch["top"], "ffn_hidden_size": arch["mf"], "activation": activation} | shared
        model["moe"] |= {"latent_size": arch.get("latent") or None}
    if "M" in letters:
        sizes = {"num_heads": arch["mh"], "head_dim": arch["mp"], "state_dim": arch["ms"], "num_groups": arch["mg"]}
        model["mamba"] = {"kind": "mamba2", **sizes}
    if arch.get("mtp"):
        blocks = (
            {"experts": True, "ffn_hidden_size": arch["mf"]}
            if "E" in letters
            else {"ffn_hidden_size": arch["ffn"], "activation": activation}
        )
        model["features"] = {"mtp": {"depth": arch["mtp"], **blocks}}
    device: dict[str, Any] = {"name": device_name(row)}
    if adapter(row):
        device["network_bytes_per_second"] = adapter(row)
    found: dict[str, Any] = {
        "format": "megaplan.spec/1",
        "name": row.get("id", "row"),
        "model": model,
        "mesh": mesh | {"dp_shard": data, "cp": cp, "tp": tp, "vocab_parallel": tp > 1},
        "batch": {"micro_batch_size": row["mbs"], "seq_length": row["seq"]},
        "schedule": {"kind": "interleaved_1f1b" if mesh["vpp"] > 1 else "1f1b", "num_microbatches": row["nmb"]},
        "precision": {"params": "bf16"},
        "host": {"name": "megatron"},
        "device": device,
    }
    if lora_of(row) is not None:  # host megatron has no terms for the memory of frozen weights; what ran the row stands beside the spec
        found |= {"lora": lora_of(row), "host": {"name": "megarun"}}
    if mesh["pp"] > 1:
        model["pattern"] = "|".join(letters[start:stop] for start, stop in _spans(row))
        found["split"] = {"mode": "manual", "reason": "as the recipe cuts"}
    return found


_AXES = {"pp": "pp", "vpp": "vp", "cp": "cp", "tp": "tp", "ep": "ep", "etp": "etp", "dp": "dp"}


def _attention(arch: dict[str, Any]) -> dict[str, Any]:
    if not arch.get("mla"):
        found = {"kind": "gqa", "num_heads": arch["a"], "num_kv_heads": arch["kv"], "head_dim": arch["hd"]}
        return found | _window(arch) if arch.get("win") else found
    ranks = {"q_lora_rank": arch["q_lora"] or None, "kv_lora_rank": arch["kv_lora"]}
    heads = {"qk_nope_head_dim": arch["nope"], "qk_rope_head_dim": arch["rope"], "v_head_dim": arch["vd"]}
    return {"kind": "mla", "num_heads": arch["a"], **ranks, **heads}


def _window(arch: dict[str, Any]) -> dict[str, Any]:
    """Attention sinks, and a window in every other layer or in as many as the model has."""
    places = [place for place, letter in enumerate(_letters(arch)) if letter == "A"]
    full = round(len(places) * (1 - (arch.get("winfrac") or 0.0)))
    whole = [places[(2 * number + 1) * len(places) // (2 * full)] for number in range(full)]
    return {"window_size": arch["win"], "full_layers": whole, "sinks": True}


def _slots(row: Row) -> int:
    """Slots of the pipeline."""
    return max(1, int(row["pp"] or 1)) * max(1, int(row["vp"] or 1))


def _letters(arch: dict[str, Any], slots: int = 1) -> str:
    """The pattern: dense layers lead, or alternate with experts where there are as many; a hybrid's blocks in any order, slots alike."""
    if arch["nM"]:
        return "".join(letter * (int(arch[f"n{letter}"]) // slots) for letter in "MEAD") * slots
    dense, routed = int(arch["nD"]), int(arch["nE"])
    if routed and dense >= arch["L"] / 2:
        return "ADAE" * routed + "AD" * (dense - routed)
    return "AD" * dense + "AE" * routed


def _pairs(row: Row) -> list[int] | None:
    """Layers of every slot, in model order; None where it is not known.

    Even where layers divide; else embedding and loss count as a layer each, or the loss alone, as the recipes of 126 and 94 layers cut.
    Else whole slots and a short last one, with the first short too where the last has none, as the recipes cut DeepSeek-V3's 61 layers.
    """
    layers, slots = row["arch"]["L"], _slots(row)
    for first, last in ((0, 0), (1, 1), (0, 1)):
        if (layers + first + last) % slots == 0:
            held = [(layers + first + last) // slots] * slots
            held[0] -= first
            held[-1] -= last
            return held
    each = -(-layers // slots)
    if not row["arch"]["nE"]:
        return None
    held = [each] * (slots - 1)
    if each * (slots - 1) >= layers:
        held[0] -= 1
    return [*held, layers - sum(held)] if sum(held) <= layers else None


def _spans(row: Row) -> list[list[int]]:
    """Spans of letters: two a layer, or a hybrid's by slots that are alike."""
    arch, slots = row["arch"], _slots(row)
    held = [len(_letters(arch, slots)) // slots] * slots if arch["nM"] else [2 * layers for layers in _pairs(row) or ()]
    edges = [0, *accumulate(held)]
    return [list(span) for span in pairwise(edges)]
