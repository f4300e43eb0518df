"""`draw(seed)`: the plain values of one random spec."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from megaplan.schedules.registry import SPLIT_BACKWARD
from random_plans.choices import LARGE, Draw, Scope, Size, divisors
from random_plans.families import add_later_kinds, later_letters, mamba1, short_convolutions
from random_plans.layout import batch_section, draw_degrees, mesh_section, random_cuts, split_section
from random_plans.lora import add_base, add_lora
from random_plans.low_precision import add_blocks, add_delayed, add_gathers, add_low_precision
from random_plans.maxtext import MAXTEXT_SHARE, maxtext_document
from random_plans.model import Shape, add_later_features, draw_hidden, draw_letters, limit_experts, model_section
from random_plans.options import add_megatron_options, add_options, add_scores, add_values, add_windows, with_layer_skew
from random_plans.settings import (
    add_allocator,
    add_dispatcher,
    add_framework,
    add_kept_on_host,
    add_layout,
    add_libraries,
    add_offload,
    add_own_modules,
    add_serving_ranks,
    add_single,
    add_turns,
    add_used_dtypes,
    device_section,
    host_section,
    megatron_section,
    optimizer_section,
    post_training_section,
    precision_section,
    recompute_section,
    run_section,
    serving_section,
    training_section,
)
from random_plans.torchtitan import TORCHTITAN_SHARE, add_state_dtypes, torchtitan_document
from random_plans.towers import add_stated, add_trained
from random_plans.variants import (
    add_attention_residuals,
    add_connections,
    add_latents,
    add_later_variants,
    add_learned,
    add_norms,
    add_shared,
    add_shared_keys,
    add_streams,
    add_variants,
)

MEGATRON_SHARE = 0.12
FIRST_RUN = 1000
"""Seed from which plans have keys that came later (`run`, `post_training`, graphs, skews of layers); pinned plans have lower ones."""
SHORTEST_ROW = 16
"""Tokens of a row from which a prompt and a response fit into it."""


def draw(seed: int, scope: Scope = Scope.ANY, size: Size = LARGE) -> dict[str, Any]:
    """Plain values of a spec, legal by construction in most cases.

    Args:
        seed: The same seed gives the same spec.
        scope: All that megaplan prices, or only what megarun builds.
        size: Bounds of widths, ranks and microbatches.
    """

    def stream(section: str) -> Draw:
        return Draw(f"{scope}/{size.name}/{seed}/{section}")

    if scope is Scope.ANY and stream("torchtitan").chance(TORCHTITAN_SHARE):
        job = torchtitan_document(stream("torchtitan spec"), f"random-{seed}")
        if seed >= FIRST_RUN:
            add_state_dtypes(stream("torchtitan dtypes"), job)
        _state_resharding(seed, stream("resharding"), job)
        return job
    if scope is Scope.ANY and seed >= FIRST_RUN and stream("maxtext").chance(MAXTEXT_SHARE):
        return maxtext_document(stream("maxtext spec"), f"random-{seed}")
    document = _of_blocks(seed, scope, size, stream)
    _state_resharding(seed, stream("resharding"), document)
    if seed >= FIRST_RUN and document.get("host", {}).get("name") != "megatron":
        add_used_dtypes(stream("used dtypes"), document)
        _add_whole_stages(stream("units"), document)
        add_blocks(stream("scales of blocks"), document)
        add_delayed(stream("delayed scaling"), document)
        add_gathers(stream("packed gathers"), document)
        add_base(stream("base"), document)
        add_attention_residuals(stream("attention residuals"), document)
        _add_units(stream("layers of a unit"), document)
    elif seed >= FIRST_RUN:
        add_layout(stream("layout"), document)
        add_single(stream("single"), document)
    return document


def _state_resharding(seed: int, draw: Draw, document: dict[str, Any]) -> None:
    """State `sharding.reshard_after_forward` as false in pinned plans, which are older than its default, and in half of the later ones."""
    if document.get("host", {}).get("name") != "megatron" and (seed < FIRST_RUN or draw.chance(0.5)):
        document["sharding"] = {"reshard_after_forward": False} | document.get("sharding", {})


def _of_blocks(seed: int, scope: Scope, size: Size, stream: Callable[[str], Draw]) -> dict[str, Any]:
    """A spec of megarun or Megatron-Core; each section has its own stream."""
    whole = stream("host")
    megatron = scope is Scope.ANY and whole.chance(MEGATRON_SHARE)
    gpt = megatron and whole.chance(0.4)
    degrees = draw_degrees(stream("degrees"), size, stream("mirrored") if seed >= FIRST_RUN else None, megatron=megatron)
    hidden = draw_hidden(stream("widths"), size, tp=degrees.mesh["tp"])
    pattern, letters = draw_letters(stream("letters"), degrees, megatron=megatron, gpt=gpt)
    if not megatron:
        pattern, letters = later_letters(stream("families"), pattern, letters, scope, hidden=hidden, tp=degrees.mesh["tp"])
    pattern, letters = short_convolutions(stream("short convolutions"), pattern, letters, scope, hidden=hidden, tp=degrees.mesh["tp"])
    cuts_of, num_layers = stream("cuts"), len(letters)
    step = 2 if gpt else 1  # one layer of GPTModel is two blocks of the spec
    cuts = [step * cut for cut in random_cuts(cuts_of, num_layers // step, degrees.slots)]
    shape = Shape(hidden, degrees.mesh["tp"], letters, size, scope, megatron)
    mesh = mesh_section(stream("mesh"), degrees, experts="E" in letters, slices=scope is Scope.ANY or seed >= FIRST_RUN)
    bars = degrees.slots > 1 and not gpt and cuts_of.chance(0.12)
    if bars:
        bounds = [0, *cuts, num_layers]
        pattern = "|".join(letters[start:stop] for start, stop in pairwise(bounds))
    if cuts_of.chance(0.03):
        pattern = pattern.lower()
    sections: dict[str, Any] = {
        "format": "megaplan.spec/1",
        "name": f"random-{seed}",
        "model": with_layer_skew(
            stream("layer skew") if seed >= FIRST_RUN else None, model_section(stream("model"), degrees, shape, pattern, mesh), letters
        ),
        "mesh": mesh,
        "batch": batch_section(stream("batch"), degrees, size),
        "schedule": {"kind": degrees.kind, "num_microbatches": degrees.num_microbatches},
        "split": split_section(stream("split"), num_layers, degrees.slots, cuts, bars=bars, pairs=gpt),
        "precision": precision_section(stream("precision"), scope, letters, pipelined=degrees.mesh["pp"] > 1, megatron=megatron),
        "optimizer": optimizer_section(stream("optimizer")),
        "recompute": recompute_section(stream("recompute"), letters, megatron=megatron),
    }
    sections["schedule"] |= {"steps_per_update": degrees.steps} if degrees.steps > 1 else {}
    add_later_features(stream, sections["model"], shape)
    if not megatron and "mamba" in sections["model"] and (section := mamba1(stream("mamba1"), shape)) is not None:
        sections["model"]["mamba"] = section
    if not megatron:
        length = sections["batch"]["seq_length"]
        add_options(stream("options"), sections["model"], shape, degrees.slots, length, runtime=scope is Scope.RUNTIME)
        add_values(stream, sections["model"], cuts, towers=seed >= FIRST_RUN and scope is not Scope.RUNTIME, parted=seed >= FIRST_RUN)
    if megatron:
        pp, count = degrees.mesh["pp"], degrees.num_microbatches
        sections["host"] = megatron_section(
            whole,
            letters,
            [group for group in divisors(count) if group >= pp],
            gpt=gpt,
            adamw=sections["optimizer"].get("matrix") == "adamw",
            selective=bool(sections["recompute"]),
            windowed="window_size" in sections["model"].get("attention", {}),
        )
        if sections["host"].get("precision_aware_optimizer"):
            sections["precision"]["moments"] = whole.choice(["fp32", "bf16", "fp16", "fp8"])
        add_megatron_options(stream("megatron options"), sections, letters, gpt=gpt)
        add_framework(stream("framework"), sections["host"])
    else:
        sections["host"] = host_section(whole)
        whole.maybe(sections, 0.3, sharding={"reshard_after_forward": True})
        whole.maybe(sections, 0.25, data={"packing": "documents"})
    add_allocator(stream("allocator"), sections["host"], stream("graphs") if not megatron and seed >= FIRST_RUN else None)
    add_scores(stream("scores"), sections["model"], stream("scales"), megatron=megatron)
    _add_whole_sections(seed, stream, sections)
    add_serving_ranks(stream("serving ranks"), sections.get("serving", {}), mesh, num_layers)
    if seed >= FIRST_RUN:
        _add_of_later_seeds(stream, sections, mesh, scope)
    drawn = {key: value for key, value in sections.items() if value or key in ("mesh",)}
    add_low_precision(stream, drawn, scope)
    add_lora(stream("lora"), drawn, scope)
    return drawn


def _add_whole_sections(seed: int, stream: Callable[[str], Draw], sections: dict[str, Any]) -> None:
    """Sections that depend on no other."""
    for name, share, section in (
        ("device", 0.4, device_section),
        ("serving", 0.15, serving_section),
        ("training", 0.5, training_section),
        ("run", 0.3, run_section),
    ):
        own = stream(name)
        if own.chance(share) and (name != "run" or seed >= FIRST_RUN):
            sections[name] = section(own)
    if seed >= FIRST_RUN and sections["host"].get("name") != "megatron":
        _add_copies(stream("copies"), sections)
        _add_controls(stream("controls"), sections)
        add_windows(stream("windows"), sections["model"])
        add_variants(stream("variants"), sections["model"])
        add_later_variants(stream("later variants"), sections["model"])
        add_learned(stream("learned"), sections["model"])
        add_norms(stream("norms"), sections["model"])
        add_later_kinds(stream("later kinds"), sections["model"], whole=sections["mesh"].get("cp", 1) == 1)
        add_libraries(stream("libraries"), sections)
        add_dispatcher(stream("dispatcher"), sections)
        add_turns(stream("turns"), sections)


def _add_copies(draw: Draw, sections: dict[str, Any]) -> None:
    """`sharding.mode`."""
    if draw.chance(0.3):
        sections["sharding"] = {"mode": "ddp", **sections.get("sharding", {})}


def _add_controls(draw: Draw, sections: dict[str, Any]) -> None:
    """Depth of gathers ahead, and parts of gathered parameters where shard groups have such parts."""
    sharding, mesh = sections.setdefault("sharding", {}), sections["mesh"]
    if draw.chance(0.25):
        sharding["prefetch"] = draw.randint(1, 3)
    shards = mesh.get("dp_shard", 1)
    banks = shards * mesh.get("cp", 1) * mesh.get("tp", 1) // (mesh.get("ep", 1) * mesh.get("etp", 1))
    sizes = [size for size in range(2, shards + 1) if shards % size == banks % size == 0]
    if sizes and draw.chance(0.5) and sharding.get("mode") != "ddp" and sharding.get("reshard_after_forward"):
        sharding["reshard_size"] = draw.choice(sizes)


def _add_whole_stages(draw: Draw, document: dict[str, Any]) -> None:
    """Make stages the units of FSDP2 in some plans whose layers have no separate mesh or dtype."""
    mesh, sharding = document["mesh"], document.get("sharding", {})
    own = "moe" in document["model"] and any(mesh.get(axis, 1) > 1 for axis in ("cp", "tp", "ep", "etp"))
    own |= "families" in document.get("precision", {}) or "lora" in document or document.get("host", {}).get("name", "megarun") != "megarun"
    own |= "towers" in document["model"] or document.get("schedule", {}).get("kind") in SPLIT_BACKWARD
    if not own and sharding.get("mode") != "ddp" and draw.chance(0.15):
        document["sharding"] = {key: value for key, value in sharding.items() if key not in ("prefetch", "reshard_size")}
        document["sharding"] |= {"reshard_after_forward": False, "wrap": "stage"}


def _add_units(draw: Draw, document: dict[str, Any]) -> None:
    """Make several layers a unit of FSDP2 in some plans whose layers have one dtype."""
    sharding = document.get("sharding", {})
    own = "wrap" in sharding or "families" in document.get("precision", {}) or document.get("host", {}).get("name", "megarun") != "megarun"
    if not own and draw.chance(0.2):
        document["sharding"] = {**sharding, "wrap": draw.randint(2, 4)}


def _add_of_later_seeds(stream: Callable[[str], Draw], sections: dict[str, Any], mesh: dict[str, Any], scope: Scope) -> None:
    megatron = sections["host"].get("name") == "megatron"
    if "cp" in mesh and not megatron and sections["model"].get("attention", {}).get("kind") == "mla" and stream("exchange").chance(0.5):
        mesh["context_exchange"] = "latents"
    limit_experts(stream("capacity"), sections["model"], megatron=megatron)
    add_own_modules(stream("own modules"), sections)
    _add_pools(stream("pools"), sections, mesh)
    _add_post_training(stream("post_training"), sections, mesh)
    if not megatron:
        add_offload(stream("offload"), sections)
    if scope is Scope.RUNTIME:
        add_trained(stream("stated towers"), sections)
        add_connections(stream("connections"), sections["model"])
        if not sections["host"].get("activation_offload"):
            add_shared_keys(stream("shared keys"), sections["model"])
    elif sections["host"].get("name") != "megatron":
        add_stated(stream("stated towers"), sections)
        add_connections(stream("connections"), sections["model"])
        add_streams(stream("streams"), sections["model"])
        add_latents(stream("latents"), sections["model"])
        if not sections["host"].get("activation_offload"):
            add_shared_keys(stream("shared keys"), sections["model"])
        add_shared(stream("shared"), sections["model"], stages=mesh.get("pp", 1))
    if not megatron:
        add_kept_on_host(stream("kept on host"), sections)


def _add_pools(draw: Draw, sections: dict[str, Any], mesh: dict[str, int]) -> None:
    """`pools` of a pipeline of megarun, whole stages after the first one; none with two copies of the model."""
    unlike = sections["host"].get("name") == "megatron" or sections["split"].get("objective") == "bottleneck"
    unlike = unlike or sections["schedule"]["kind"] == "dualpipe"
    if mesh.get("pp", 1) == 1 or unlike or not draw.chance(0.4):
        return
    per_stage = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1) * mesh.get("cp", 1) * mesh.get("tp", 1)
    stages = draw.randint(1, mesh["pp"] - 1)
    first = draw.randint(1, stages)
    counts = [count for count in (first, stages - first) if count]
    sections["pools"] = [{"count": count * per_stage, "device": device_section(draw) or {"name": "h100-sxm"}} for count in counts]


def _add_post_training(draw: Draw, sections: dict[str, Any], mesh: dict[str, int]) -> None:
    """`post_training` of a spec whose rows hold a prompt and a response."""
    length = sections["batch"]["seq_length"]
    if draw.chance(0.3) and length >= SHORTEST_ROW and "pools" not in sections:
        sections["post_training"] = post_training_section(draw, length, mesh)
