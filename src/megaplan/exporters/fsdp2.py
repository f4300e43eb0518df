"""A wrap plan for torch's own FSDP2 and pipelining: modules to shard, with mesh, order and dtypes."""

import json
from typing import Any

from megaplan.exporters.modules import TORCH_DTYPES, optimizer_groups, stage_modules
from megaplan.exporters.values import Exported, Loss, Source, complete
from megaplan.inventory.tensors import fsdp_units, has_groups
from megaplan.spec.pattern import depth_blocks

FORMAT = "megaplan.fsdp2/1"
CARRIED = frozenset({
    "model", "mesh", "sharding", "schedule", "batch", "data", "precision", "optimizer", "recompute", "training",
})  # fmt: skip


def export_fsdp2(source: Source) -> Exported:
    """JSON. torch shards modules and runs stages; the model, its tensor and expert parallelism and the loop are the reader's code."""
    spec, losses = source.spec, []
    precision = spec.precision
    if precision.moments is not precision.master:
        detail = f"precision.moments = {precision.moments}, precision.master = {precision.master}: torch's optimizers follow the parameter"
        losses.append(Loss("precision.moments", detail, f"moments: {precision.master}"))
    pipelined = spec.mesh.pp > 1
    if pipelined and precision.reduce is not precision.grads:
        detail = (
            f"precision.reduce = {precision.reduce}, precision.grads = {precision.grads}: FSDP2 accumulates in the dtype of the reduction"
        )
        losses.append(Loss("precision.reduce", detail, f"reduce: {precision.grads}"))
    if spec.sharding.copies:
        losses.append(
            Loss("sharding.mode", "sharding.mode = ddp: fully_shard shards state that this plan replicates", "sharding: {mode: fsdp}")
        )
    if spec.host.kind.own_layers:
        detail = f"host.name = {spec.host.kind.name}: its attention, cross-entropy and workspace settings are not torch's"
        losses.append(Loss("host", detail, "host: {name: megarun}"))
    name, lost = source.torch_schedule
    losses += lost
    rank_of = [[slot.pp_rank, slot.chunk] for slot in source.slots()]
    document = {
        "format": FORMAT,
        "name": spec.name,
        "model": spec.model.model_dump(mode="json"),
        "layers": source.letters,
        "mesh": spec.mesh.model_dump(mode="json"),
        "device_mesh": {
            "dense": _dims(spec.mesh, ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
            "experts": _dims(spec.mesh, ("pp", "dp_replicate", "efsdp", "ep", "etp")),
        },
        "stages": [
            {"slot": index, "pp_rank": rank, "chunk": chunk, "modules": modules}
            for index, ((rank, chunk), modules) in enumerate(zip(rank_of, stage_modules(source), strict=True))
        ],
        "schedule": {
            "class": name,
            "num_microbatches": spec.schedule.num_microbatches,
            "steps_per_update": spec.schedule.steps_per_update,
        },
        "fully_shard": _wraps(source),
        **({} if spec.sharding.prefetch is None else {"prefetch": spec.sharding.prefetch}),
        "checkpoint": {f"layers.{index}": source.spec.recompute.of(letter) for index, letter in enumerate(source.letters)},
        "optimizer": optimizer_groups(source),
        "precision": {key: TORCH_DTYPES[str(getattr(precision, key))] for key in ("grads", "master", "moments")},
        "batch": {**spec.batch.model_dump(mode="json"), "global_batch_size": source.spec.global_batch_size},
        "data": spec.data.model_dump(mode="json"),
        "training": spec.training.model_dump(mode="json"),
    }
    return complete(source, json.dumps(document, indent=1) + "\n", CARRIED, losses)


def _dims(mesh: Any, names: tuple[str, ...]) -> dict[str, int]:
    return {name: getattr(mesh, name) for name in names}


def _wraps(source: Source) -> list[dict[str, Any]]:
    """Bottom up: an expert bank over its own shard mesh, each unit of layers and prediction depth, each stage.

    A bank's parameters are the rows of all its experts: stacks, sharded along dim 0, would need padding with more shards than experts.
    """
    spec, sharding = source.spec, source.spec.sharding
    reshard = sharding.kept_over or sharding.reshard_after_forward
    found: list[dict[str, Any]] = []

    def add(modules: list[str], mesh: str, dtype: object) -> None:
        mixed = {"param_dtype": TORCH_DTYPES[str(dtype)], "reduce_dtype": TORCH_DTYPES[str(spec.precision.reduce)]}
        found.append({"modules": modules, "mesh": mesh, "reshard_after_forward": reshard, "mp_policy": mixed})

    def add_bank(module: str, dtype: object) -> None:
        add([module], "experts: dp_replicate, efsdp", dtype)
        found[-1]["parameter_shape"] = "[experts / ep · rows, columns]"

    if sharding.wraps_stages:
        for modules in stage_modules(source):
            add(modules, "dense: dp_replicate, dp_shard, cp", spec.precision.params)
        return found
    units = [
        unit for modules in stage_modules(source) for unit in fsdp_units(modules, sharding.unit_layers) if unit[0].startswith("layers.")
    ]
    for unit in units:
        letters = [source.letters[int(name.removeprefix("layers."))] for name in unit]
        dtype = spec.precision.of(letters[0])
        for name, letter in zip(unit, letters, strict=True):
            if letter == "E":
                add_bank(f"{name}.experts", dtype)
        add(list(unit), "dense: dp_replicate, dp_shard, cp", dtype)
    dtype = spec.precision.params
    for modules in stage_modules(source):
        for depth in [name for name in modules if has_groups(name) and not name.startswith("layers.")]:
            for block in depth_blocks(spec.model):
                if block.family.banks:
                    add_bank(f"{depth}.{block.name}.experts", dtype)
            add([depth], "dense: dp_replicate, dp_shard, cp", dtype)
        add([name for name in modules if not has_groups(name)], "dense: dp_replicate, dp_shard, cp", dtype)
    return found
