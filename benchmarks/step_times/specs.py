"""The spec of a published row: model, mesh, batch, precision and device as users write them. `rows` has what only a framework defines."""

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
"""Bytes per second of an adapter if a cluster differs from the data sheet: llm-foundry's README, 800 Gb/s for eight A100 of 80 GB."""
_FOUND: dict[str, Spec] = {}


def device_name(row: Row) -> str:
    """The device's name in the data file."""
    return DEVICES.get(row["device"], row["device"].lower())


def adapter(row: Row) -> int | None:
    """Bytes per second of the cluster's adapters; None for those of the data file."""
    return ADAPTERS.get((row["framework"], row["device"]))


def spec_of(row: Row) -> Spec:
    """The row's spec, with the software that ran the row if specs can state it and no rule refuses it; kept by the row's id.

    A layout that a framework ran and a rule of specs refuses is not checked.

    Raises:
        ValueError: The blocks of a hybrid do not divide into equal slots.
    """
    known = row.get("id")
    if known not in _FOUND:
        _FOUND[known] = _made(row)
    return _FOUND[known]


def _made(row: Row) -> Spec:
    plain, launch = document(row), launch_of(row)
    for whole in (plain | launch, plain) if launch is not None else (plain,):
        try:
            return spec_from_document(whole)
        except MegaplanError:
            continue
    return Spec.model_validate(plain)


def is_guessed(row: Row) -> bool:
    """True if the cuts of a row are unknown, or a rule of specs refuses its layout."""
    if not row["arch"]["nM"] and _pairs(row) is None:
        return True
    try:
        spec_from_document(document(row))
    except MegaplanError:
        return True
    return False


def spans(spec: Spec) -> tuple[tuple[int, int], ...]:
    """Layers of each slot."""
    return parse_pattern(spec.model.pattern, spec.model.num_layers).spans or ((0, spec.model.num_layers),)


def owners(spec: Spec) -> list[int]:
    """Pipeline rank of each slot, in loop placement."""
    return [slot % spec.mesh.pp for slot in range(spec.mesh.pp * spec.mesh.vpp)]


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
        model["moe"] |= {"latent_size": arch.get("latent") or None, "bias": bool(arch.get("win"))}
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
        "optimizer": {"matrix": "adamw"},
        "host": {"name": "megatron"},
        "device": device,
    }
    if lora_of(row) is not None:  # host megatron has no memory model of frozen weights; `rows` has the software that ran the row
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
    """Attention sinks, biases, and a window in the model's share of the layers, spread evenly."""
    places = [place for place, letter in enumerate(_letters(arch)) if letter == "A"]
    full = round(len(places) * (1 - (arch.get("winfrac") or 0.0)))
    whole = [places[(2 * number + 1) * len(places) // (2 * full)] for number in range(full)]
    return {"window_size": arch["win"], "full_layers": whole, "sinks": True, "bias": True, "output_bias": True}


def _slots(row: Row) -> int:
    """Slots of the pipeline."""
    return max(1, int(row["pp"] or 1)) * max(1, int(row["vp"] or 1))


def _letters(arch: dict[str, Any], slots: int = 1) -> str:
    """The pattern: dense layers are first, or alternate with experts if there are as many; slots of a hybrid are equal."""
    if arch["nM"]:
        if any(arch[f"n{letter}"] % slots for letter in "MEAD"):
            raise ValueError(f"the blocks of a hybrid do not divide into {slots} equal slots")
        return "".join(letter * (int(arch[f"n{letter}"]) // slots) for letter in "MEAD") * slots
    dense, routed = int(arch["nD"]), int(arch["nE"])
    if routed and dense >= arch["L"] / 2:
        return "ADAE" * routed + "AD" * (dense - routed)
    return "AD" * dense + "AE" * routed


def _pairs(row: Row) -> list[int] | None:
    """Layers of every slot, in model order; None if they are not known.

    Slots are equal if the layers divide; otherwise embedding and loss count as one layer each, or only the loss, as in the recipes for
    126 and 94 layers. Otherwise the last slot has fewer layers, and so has the first if the last would have none, as in DeepSeek-V3's
    recipes for 61 layers.
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
    """Spans of letters: two letters per layer; a hybrid has equal slots.

    If the cuts are not known, the first slots have one layer more.
    """
    arch, slots = row["arch"], _slots(row)
    even = [arch["L"] // slots + (slot < arch["L"] % slots) for slot in range(slots)]
    held = [len(_letters(arch, slots)) // slots] * slots if arch["nM"] else [2 * layers for layers in _pairs(row) or even]
    edges = [0, *accumulate(held)]
    return [list(span) for span in pairwise(edges)]
