"""The layers of a launch and their cuts: Megatron's hybrid pattern, or its counts of layers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megaplan.errors import MegaplanError
from megaplan.hosts.megatron.argument import flag
from megaplan.hosts.megatron.pattern import OURS, HybridPattern, parse_hybrid, spread_pattern
from megaplan.hosts.megatron.stages import NAMES, check_layout, even_sizes, flag_list, layer_kinds, parse_layout
from megaplan.importers.megatron.arguments import Arguments, moved
from megaplan.spec.models import MAX_LAYERS

_HYBRID_PROGRAM = re.compile(r"pretrain_(?:mamba|hybrid)\w*\.py$")
NO_LETTER = {
    "D": "sparse attention is read of GPT models, --experimental-attention-variant dsa",
}


@dataclass(frozen=True, slots=True)
class LaunchLayers:
    """The layers of a launch.

    Attributes:
        stages: Letters of each virtual stage, in model order; one stage without a pipeline.
        latent: True if attention is latent.
        num_modules: Number of prediction modules.
        hybrid: True if Megatron builds its HybridModel.
        ahead: Letters of a prediction module's blocks.
    """

    stages: tuple[str, ...]
    latent: bool
    num_modules: int
    hybrid: bool
    ahead: str = "AD"

    @property
    def letters(self) -> str:
        """One letter per layer."""
        return "".join(self.stages)


def read_stack(launch: Arguments, pp: int) -> LaunchLayers:
    """The layers and their cuts; an empty stack if something is wrong."""
    hybrid = launch.value("hybrid_layer_pattern") is not None or launch.value("hybrid_override_pattern") is not None
    shares = [
        launch.number(f"hybrid_{kind}_ratio") or 0.0 if launch.value(f"hybrid_{kind}_ratio") else 0.0 for kind in ("attention", "mlp")
    ]
    if not hybrid and (any(shares) or _HYBRID_PROGRAM.search(launch.program)):
        hybrid = _spread_kinds(launch, *shares)
    try:
        stack = _hybrid(launch, pp) if hybrid else _gpt(launch, pp)
    except MegaplanError as error:
        key = "hybrid_layer_pattern" if hybrid else "pipeline_model_parallel_layout"
        launch.fail([moved(found, launch.at(key)) for found in error.diagnostics])
        return LaunchLayers(("A",), latent=False, num_modules=0, hybrid=hybrid)
    return stack


def _spread_kinds(launch: Arguments, attention: float, mlp: float) -> bool:
    """Give the launch the pattern that its shares of attention and MLP layers mean; without both all layers are Mamba."""
    layers = launch.whole("num_layers", most=MAX_LAYERS)
    if not (0 <= attention <= 1 and 0 <= mlp <= 1 and attention + mlp <= 1):
        launch.wrong(
            "hybrid_attention_ratio", f"{attention:g} and --hybrid-mlp-ratio {mlp:g}", "two shares from 0 to 1, together at most 1"
        )
        return False
    launch.values["hybrid_override_pattern"] = spread_pattern(layers, attention, mlp)
    return True


def _hybrid(launch: Arguments, pp: int) -> LaunchLayers:
    key = "hybrid_layer_pattern" if launch.value("hybrid_layer_pattern") is not None else "hybrid_override_pattern"
    given = str(launch.value(key))
    if (text := given.translate({ord("["): None, ord("]"): None})) != given:
        launch.note(key, "brackets of a fork group layers, and change none")
    pattern = parse_hybrid(text, launch.at(key))
    for other in (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):
        if launch.value(other) not in (None, False):
            launch.cannot(other, "a hybrid pattern forbids it; '|' says where virtual stages begin")
    first, last = (launch.optional(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    stages = pattern.stages(pp, first, last, where=launch.at(key))
    pattern = _with_module(launch, pattern)
    stated, modules = launch.optional("num_layers"), launch.optional("mtp_num_layers")
    if modules is not None and modules != pattern.num_modules:
        launch.cannot("mtp_num_layers", f"the pattern has {pattern.num_modules} prediction modules", pattern.num_modules)
    if stated is not None and stated != len(pattern.main):
        launch.warn("num_layers", f"the pattern has {len(pattern.main)} layers, which Megatron uses")
    used = set(pattern.main) | set(pattern.module or "")
    for symbol in sorted(used & set(NO_LETTER)):
        launch.cannot(key, f"'{symbol}' at column {str(launch.value(key)).index(symbol) + 1}: {NO_LETTER[symbol]}")
    if not pattern.main:
        launch.cannot(key, "the pattern has no layer")
    plain = used & set("*+")
    latent = (launch.given("multi_latent_attention") and bool(plain)) or "+" in used
    return LaunchLayers(
        tuple("".join(OURS.get(one, "A") for one in stage) for stage in stages),
        latent,
        pattern.num_modules,
        hybrid=True,
        ahead=_ahead(launch, key, pattern),
    )


def _ahead(launch: Arguments, key: str, pattern: HybridPattern) -> str:
    """Letters of a prediction module; all except D reuse the dimensions of the layers."""
    module = pattern.module if pattern.module is not None else "*-"
    ahead = "".join(OURS.get(one, "A") for one in module)
    beyond = [symbol for symbol in module if OURS.get(symbol, "A") not in ("D", *map(OURS.get, pattern.main))]
    if pattern.module is not None and beyond:
        launch.cannot(
            key,
            f"module {module!r}: '{beyond[0]}' is in no layer, but a prediction module of a spec has the dimensions of the model's layers",
        )
    if ahead.count("E") > 1:
        launch.cannot(key, f"module {module!r}: a spec's prediction module has one E at most")
    return ahead


def _with_module(launch: Arguments, pattern: HybridPattern) -> HybridPattern:
    """The layers with the prediction module that its own argument gives."""
    module, count = launch.value("mtp_hybrid_override_pattern"), launch.optional("mtp_num_layers")
    return pattern._replace(module=str(module), num_modules=count) if module and count and pattern.module is None else pattern


def _gpt(launch: Arguments, pp: int) -> LaunchLayers:
    layers = launch.whole("num_layers", most=MAX_LAYERS // 2)
    frequency = launch.value("moe_layer_freq")
    period = re.fullmatch(r"-?\d+", str(frequency)) is not None
    if isinstance(frequency, bool) or (period and not 0 < int(str(frequency)[:20]) <= MAX_LAYERS):
        launch.wrong("moe_layer_freq", frequency, f"a period from 1 to {MAX_LAYERS:,}, or a list of 0 and 1")
        frequency = 1
    kinds = layer_kinds(frequency, layers, launch.value("num_experts") is not None)
    if len(kinds) != layers:
        launch.cannot("moe_layer_freq", f"it names {len(kinds)} layers, and --num-layers is {layers}")
        kinds = "-" * layers
    modules = launch.optional("mtp_num_layers") or 0
    layout = launch.value("pipeline_model_parallel_layout")
    if layout is None:
        ends = {key: launch.given(key) for key in _COUNTED_ENDS}
        spread = {key: _spread(launch, key) for key in _SPREAD}
        sizes = even_sizes({**ends, **spread}, layers, pp)
        _whole_sizes(launch, sizes, layers, pp, {key: size for key, size in spread.items() if size})
    else:
        stages = (
            _listed(layout)
            if isinstance(layout, list)
            else parse_layout(str(layout).replace("\\", ""), launch.at("pipeline_model_parallel_layout"))
        )
        check_layout(stages, pp, layers, modules, launch.at("pipeline_model_parallel_layout"))
        if modules and "m" not in stages[-1]:
            launch.cannot(
                "pipeline_model_parallel_layout", "the launch has prediction modules before the last stage, and a plan has them on it"
            )
        sizes = [stage.count("t") for stage in stages]
    for key in (*_SPREAD, *_COUNTED_ENDS):
        launch.value(key)
    letters = [mixer + OURS[kind] for mixer, kind in zip(_mixers(launch, layers), kinds, strict=True)]
    return LaunchLayers(
        _stages(letters, sizes, _no_ops(launch, layers)),
        launch.given("multi_latent_attention"),
        modules,
        hybrid=False,
        ahead=f"A{OURS[kinds[-1]]}",
    )


_COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_SPREAD = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    *_ENDS,
)


def _stages(letters: list[str], sizes: list[int], empty: frozenset[int]) -> tuple[str, ...]:
    """Letters of each stage, without those of layers that do nothing."""
    letters = ["" if place in empty else letter for place, letter in enumerate(letters)]
    cuts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    return tuple("".join(letters[start:stop]) for start, stop in pairwise(cuts))


def _no_ops(launch: Arguments, layers: int) -> frozenset[int]:
    """Layers of MindSpeed that pass their input through; they fill up stages and have no tensors."""
    given = launch.values.get("noop_layers")
    if given is None:
        return frozenset()
    launch.pass_over("noop_layers")
    words = re.split(r"[, ]+", " ".join(map(str, given)) if isinstance(given, list) else str(given).strip())
    places = frozenset(int(word) for word in words if word.isdecimal() and len(word) < 5)
    if len(places) != len(words) or max(places) >= layers:
        launch.cannot("noop_layers", f"it names layers from 0 on, of {layers}, with commas between them", f"{layers - 1}")
        return frozenset()
    launch.note("noop_layers", f"layers {', '.join(map(str, sorted(places)))} pass their input through: {layers - len(places)} are planned")
    return places


def _spread(launch: Arguments, key: str) -> int | None:
    """A number of layers or stages; None if it is absent or 0."""
    return launch.whole(key, most=MAX_LAYERS) if launch.value(key) else None


def _mixers(launch: Arguments, layers: int) -> str:
    """Letters of a GPT model's mixers: attention, or a gated delta net if that is the variant, with attention in every n-th layer."""
    variant, frequency = launch.word("experimental_attention_variant"), launch.value("linear_attention_freq")
    if variant in (None, "dsa"):
        return "A" * layers
    if isinstance(frequency, int) and frequency > 0:
        return "".join("A" if index % frequency == 0 else "G" for index in range(1, layers + 1))
    flags = flag_list(frequency or [])
    if len(flags) != layers:
        launch.cannot("linear_attention_freq", f"it names {len(flags)} layers, and --num-layers is {layers}")
        return "A" * layers
    return "".join("G" if flag == "1" else "A" for flag in flags)


def _whole_sizes(launch: Arguments, sizes: list[int], layers: int, pp: int, given: dict[str, int]) -> None:
    """Refuses counts of layers that do not add up, names the argument at fault and gives values that would fit."""
    if sum(sizes) == layers and min(sizes) >= 0:
        return
    ends = {key: given[key] for key in _ENDS if key in given}
    if ends:
        _refuse_ends(launch, ends, layers, pp)
    else:
        _refuse_stages(launch, given, layers, pp)


def _refuse_ends(launch: Arguments, ends: dict[str, int], layers: int, pp: int) -> None:
    key, placed, between = next(reversed(ends)), sum(ends.values()), pp - len(ends)
    others = "".join(f"with {flag(other)} {size}, " for other, size in ends.items() if other != key)
    said = f"{others}{placed} of {layers} layers are placed"
    if between:
        said += f", and {layers - placed} do not divide over {between} other stage{'s' * (between > 1)}"
    launch.cannot(key, said, _fitting_end(layers, pp, ends))


def _refuse_stages(launch: Arguments, given: dict[str, int], layers: int, pp: int) -> None:
    counted = [flag(key) for key in _COUNTED_ENDS if launch.values.get(key)]
    per, total = given.get("num_layers_per_virtual_pipeline_stage"), layers + len(counted)
    virtual = given.get("num_virtual_stages_per_pipeline_rank") or (total // pp // per if per and total // pp >= per else 1)
    stages = pp * virtual
    counts = f"{pp} stages" if virtual == 1 else f"{stages} virtual stages, {virtual} on each of {pp} ranks"
    if per and virtual * per * pp != total:
        counts = f"stages of {flag('num_layers_per_virtual_pipeline_stage')} {per} on {pp} ranks"
        stages = pp * per
    whole = f"{layers} layers" + (f" and {' and '.join(counted)}" if counted else "")
    fits = _fitting_layers(layers, pp, stages, counted, alone=not (per or virtual > 1))
    launch.cannot("num_layers", f"{whole} do not divide over {counts}: {total} % {stages} = {total % stages}", fits)


def _fitting_layers(layers: int, pp: int, stages: int, counted: list[str], *, alone: bool) -> str:
    """Counts of layers that divide, and other arguments with which these do; `alone`: each rank has one stage."""
    total = layers + len(counted)
    nearest = [size for size in (total // stages * stages, -(-total // stages) * stages) if size > len(counted)]
    fits = f"{' or '.join(str(size - len(counted)) for size in dict.fromkeys(nearest))}"
    last = layers - (pp - 1) * -(-layers // pp)
    if pp > 1 and alone and not counted and last > 0:
        fits += f"; or --decoder-last-pipeline-num-layers {last}"
    also = [each for each in range(pp, 1, -1) if total % each == 0][:1] if alone else []
    return fits + (f"; or --pipeline-model-parallel-size {also[0]}" if also else "")


def _fitting_end(layers: int, pp: int, ends: Mapping[str, int]) -> int | None:
    """Layers of the last given end stage, nearest to its number, for which the remaining layers divide evenly; None if none fit."""
    *rest, (_, given) = ends.items()
    between, left = pp - len(ends), layers - sum(size for _, size in rest)
    found = [size for size in range(1, left + 1) if (left - size) % between == 0] if between else [left] if left > 0 else []
    return min(found, key=lambda size: (abs(size - given), size), default=None)


def _listed(layout: list[Any]) -> tuple[str, ...]:
    return tuple("".join(NAMES.get(str(token), "?") for token in (stage if isinstance(stage, list) else [stage])) for stage in layout)
