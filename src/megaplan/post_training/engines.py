"""Engines as data: defaults and figures (`engines.json`), and the memory of an engine's device."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megaplan.budget.serving import Served, ServingTimes, forward_flops, served, serving_budget, serving_degrees
from megaplan.columns import Basis
from megaplan.diagnostics import refuse
from megaplan.dtypes import DType
from megaplan.errors import MegaplanError
from megaplan.goodput.figures import RunFigure
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.spec.host import device_of
from megaplan.spec.models import Serving, Spec
from megaplan.units import format_bytes

if TYPE_CHECKING:
    from megaplan.spec.post_training import PostTraining

DATA = Path(__file__).with_name("engines.json")
SHARED = "shared"
SECOND_NS = 10**9
COMMUNICATORS = "nccl"
SETTINGS = ("memory_fraction", "max_sequences", "batched_tokens", "block_size")
LARGEST_FRACTION, MOST_RANKS = 0.9, 64
"""Fraction of a device, and ranks of a tensor group, up to which MP852 proposes more."""
STREAM_WIDTHS = 6
"""Tensors of the residual stream's width that an engine's forward has at a time."""


@cache
def engine_figures(name: str) -> dict[str, RunFigure]:
    """Figures of an engine, and those that engines share, by name."""
    document = json.loads(DATA.read_text(encoding="utf-8"))
    records = document[SHARED] | document[name]
    return {key: RunFigure(key, each["value"], each["unit"], Basis(each["basis"]), each["source"]) for key, each in records.items()}


class EngineMemory(NamedTuple):
    """A device of the engine.

    Attributes:
        columns: Bytes by column.
        cache_tokens: Tokens that fit in its tensor group's cache; 0 for a model without one.
        model: The served model.
        degrees: Ranks of a tensor group, stages, and ranks of the experts.
        max_sequences: Sequences that a tensor group generates at a time at most.
        batched_tokens: Tokens of its largest forward.
        prefix_cache: Responses to one prompt share its pages.
    """

    columns: dict[str, int]
    cache_tokens: int
    model: Served
    degrees: tuple[int, int, int]
    max_sequences: int
    batched_tokens: int
    prefix_cache: bool

    @property
    def group_size(self) -> int:
        """Devices that hold the model once."""
        tp, pp, ep = self.degrees
        return pp * max(tp, ep)


def engine_memory(spec: Spec, plan: PostTraining, longest: float) -> EngineMemory:
    """Memory of an engine's device.

    Args:
        spec: A checked spec.
        plan: The section.
        longest: Tokens of the longest sequence.

    Raises:
        MegaplanError: MP852, the fraction has no room for one sequence.
    """
    given, known, device = plan.rollout, engine_figures(plan.rollout.engine), device_of(spec.device)
    degrees = given.tp, given.pp, given.ep or given.tp
    fraction, sequences, batched, block = (setting(plan, name) for name in SETTINGS)
    sequences, batched, block = int(sequences), int(batched), int(block)
    dtype: DType = given.dtype or spec.precision.params
    serving = Serving(
        batch_size=1,
        context_length=block,
        kv_dtype=given.kv_dtype,
        cache="paged",
        block_size=block,
        tp=degrees[0],
        pp=degrees[1],
        ep=degrees[2],
    )
    mesh = spec.mesh.model_copy(update={"vocab_parallel": True})
    merged = spec.model_copy(update={"serving": serving, "precision": spec.precision.model_copy(update={"params": dtype}), "mesh": mesh})
    inventory = build_inventory(merged)
    budget = serving_budget(merged, inventory)
    assert budget is not None
    whole = budget.stages or (budget,)
    parameters = max(stage.parameters_bytes for stage in whole)
    page = max(stage.kv_cache_bytes for stage in whole)
    state = max(stage.recurrent_state_bytes for stage in whole)
    context = sum(figure.value for name, figure in device.reserve if name != COMMUNICATORS or max(degrees) > 1)
    activations = batched * (STREAM_WIDTHS * spec.model.hidden_size + widest_mlp(spec, degrees[0])) * 2
    activations += int(sequences * spec.model.vocab_size * known["logit_bytes"].value)
    graphs = int(known["graph_bytes"].value) if given.graphs else 0
    if known["all_in_fraction"].value:
        room = int(fraction * device.capacity.value) - parameters - activations - graphs - context
    else:
        room = int(fraction * (device.capacity.value - context)) - parameters
    if given.max_sequences is None:
        sequences = _with_states(sequences, state, room // (2 if page else 1))
    states = sequences * state
    room -= states
    pages = max(room, 0) // page if page else 0
    if room < 0 or (page and pages * block < longest):
        needed = int(-(-longest // block) * page)
        raise _without_room(plan, device.capacity.value, room, parameters, f"{longest:,.0f}", needed)
    columns = {
        "engine_parameters": parameters, "kv_cache": pages * page, "recurrent_states": states, "engine_activations": activations,
        "engine_graphs": graphs, "engine_context": context,
    }  # fmt: skip
    model = served(merged, inventory, degrees, dtype, given.kv_dtype)
    model = replace(model, host_ns=_ns(known, "host_step_seconds"), eager_ns=_eager_ns(known, graphs=given.graphs))
    return EngineMemory(columns, pages * block, model, degrees, sequences, batched, bool(setting(plan, "prefix_cache")))


def serving_times(spec: Spec, inventory: Inventory) -> ServingTimes | None:
    """Times of the model of the section `serving` in vLLM, whose time of the host is added; None without the section.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.

    Raises:
        MegaplanError: MP504, the device is unknown.
    """
    serving = spec.serving
    if serving is None:
        return None
    known, degrees = engine_figures("vllm"), serving_degrees(spec)
    tp, pp, ep = degrees
    model = replace(served(spec, inventory, degrees, spec.precision.params, serving.kv_dtype), host_ns=_ns(known, "host_step_seconds"))
    flops = forward_flops(spec, inventory, serving.context_length)
    seconds = model.decode_seconds(serving.batch_size, serving.context_length), model.prefill_seconds(serving.context_length, flops)
    decode, prefill = (int(each * SECOND_NS) for each in seconds)
    low, high = known["iteration_low"].value, known["iteration_high"].value
    return ServingTimes(decode, prefill, serving.batch_size * max(1, ep // tp), pp * max(tp, ep), low, high)


def _ns(known: dict[str, RunFigure], name: str) -> int:
    """A time of the host in whole nanoseconds."""
    return int(known[name].value * SECOND_NS)


def _eager_ns(known: dict[str, RunFigure], *, graphs: bool) -> int:
    """Time of the host to launch a layer, which captured graphs do not need."""
    return 0 if graphs else _ns(known, "eager_layer_seconds")


def _with_states(sequences: int, state: int, room: int) -> int:
    """The sequences that an engine admits: no more than it has states for."""
    return max(1, min(sequences, room // state)) if state else sequences


def _without_room(plan: PostTraining, capacity: int, room: int, parameters: int, longest: str, needed: int) -> MegaplanError:
    """MP852, with a larger fraction if that is enough, else with the ranks of a tensor group whose shares of the parameters leave room."""
    fraction, key, rollout = setting(plan, "memory_fraction"), "post_training.rollout.memory_fraction", plan.rollout
    ranks = max(rollout.tp, rollout.ep or 1)
    detail = (
        f"memory_fraction {fraction:g} of {format_bytes(capacity)} leaves {format_bytes(room)} for the cache after"
        f" {format_bytes(parameters)} of parameters, and one sequence of {longest} tokens takes {format_bytes(needed)}"
    )
    if needed - room <= (LARGEST_FRACTION - fraction) * capacity:
        return refuse("MP852", detail, f"--set {key}={LARGEST_FRACTION:g}", key=key)
    tp = 2 * ranks
    while tp < MOST_RANKS and parameters * ranks // tp + needed > room + parameters:
        tp *= 2
    experts = "" if rollout.ep is None else " --set post_training.rollout.ep=null"
    return refuse("MP852", detail, f"--set post_training.rollout.tp={tp}{experts}", key=key)


def setting(plan: PostTraining, name: str) -> float:
    """A setting of the engine: the plan's, or the engine's default."""
    given: float | None = getattr(plan.rollout, name)
    return engine_figures(plan.rollout.engine)[name].value if given is None else given


def widest_mlp(spec: Spec, tp: int) -> int:
    """Elements per token inside the widest MLP: gate, up and product; for experts, of all rows of a token."""
    model = spec.model
    dense = 3 * model.mlp.ffn_hidden_size // tp if model.mlp is not None else 0
    if model.moe is None:
        return dense
    routed = model.moe.top_k * (3 * model.moe.ffn_hidden_size // tp + model.moe.row_width(model.hidden_size))
    return max(dense, routed)
