"""All rules about more than one key. Each group yields everything it finds; no group stops another."""

from collections.abc import Iterator

from megakernels.libraries import GENERATION
from megaplan.devices import TPU, device_names, load_device
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, MegaplanError, Severity
from megaplan.families.registry import FAMILIES
from megaplan.hosts.registry import HOSTS
from megaplan.inventory.adapters import adaptable
from megaplan.inventory.tensors import ParamTensor
from megaplan.schedules.registry import schedule_problems
from megaplan.spec.context import Checked, Locate
from megaplan.spec.document import NOWHERE
from megaplan.spec.host import device_of
from megaplan.spec.lora import Lora
from megaplan.spec.low_precision_rules import low_precision_rules
from megaplan.spec.mesh_rules import mesh_rules
from megaplan.spec.model_rules import model_rules, pattern_rules
from megaplan.spec.models import Spec
from megaplan.spec.pattern import Pattern, has_boundaries, parse_pattern
from megaplan.spec.pools import parts_of, pool_rules
from megaplan.spec.serving_rules import serving_rules
from megaplan.spec.split_rules import split_rules
from megaplan.spec.training import StableRate, warm_up_steps
from megaplan.wording import plural, series


def of_another_host(key: str, name: str, locate: Locate) -> Diagnostic:
    """MP901: the host of that name does not have a key of the section."""
    other = next(other.name for other in HOSTS.values() if key in other.keys)
    detail = f"host.{key} is a key of host {other}, and host.name = {name}"
    return diagnostic("MP901", detail, locate(f"host.{key}"), (f"remove host.{key}", f"host: {{name: {other}}}"))


def host_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP901, MP695, MP696, MP931, and the host's own MP902 … MP907."""
    host, kind = checked.spec.host, checked.spec.host.kind
    for key in sorted(host.model_fields_set - kind.keys - {"name"}):
        yield of_another_host(key, kind.name, checked.locate)
    for key, value, known in (("cuda_graphs", host.graphs, kind.graphs), ("moe_dispatcher", host.dispatcher, kind.dispatchers)):
        if value not in known and key in kind.keys:
            detail = f"host.{key} = {value}, but host.name = {kind.name} has {', '.join(known)}"
            yield checked.error("MP695", detail, f"host.{key}", f"{key}: {known[0]}", f"remove host.{key}")
    yield from _libraries(checked)
    if checked.spec.device.step_factor is not None and kind.step is None:
        detail = f"device.step_factor = {checked.spec.device.step_factor:g}, host.name = {kind.name}: its steps have no fitted constants"
        yield checked.error("MP931", detail, "device.step_factor", "step_factor: null", "device: {reached: {bf16: 0.6}}")
    if kind.limits is not None:
        yield from kind.limits(checked)


def _libraries(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP696."""
    spec = checked.spec
    if not spec.host.libraries or "libraries" not in spec.host.kind.keys:
        return
    named = ", ".join(spec.host.libraries)
    try:
        generation = load_device(spec.device.name).generation
    except MegaplanError:  # another rule reports it
        return
    if len(set(spec.host.libraries)) < len(spec.host.libraries):
        yield checked.error("MP696", f"host.libraries = [{named}] names one of them twice", "host.libraries", "name each once")
    elif not spec.host.uses_triton:
        detail = f"host.libraries = [{named}], and host.kernels = {spec.host.kernels} runs plain torch"
        yield checked.error("MP696", detail, "host.libraries", "kernels: triton", "remove host.libraries")
    elif generation != GENERATION:
        detail = f"host.libraries = [{named}], and device.name = {spec.device.name} is of generation {generation}, not {GENERATION}"
        yield checked.error("MP696", detail, "host.libraries", "remove host.libraries", "device: {name: h200}")


def lora_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP508, MP725, MP726 and MP902."""
    lora = checked.spec.lora
    if lora is None:
        return
    if not checked.spec.host.kind.trained:
        detail = f"lora.rank = {lora.rank}, but host.name = {checked.spec.host.kind.name} has no terms for adapters and frozen parameters"
        yield checked.error("MP902", detail, "lora", "--set 'host={name: megarun}'", "remove lora")
    if checked.letters is not None:
        yield from _named(checked, lora)
        yield from _cut_blocks(checked, lora)
    for key, given, instead in _unsupported(checked, lora):
        yield checked.error("MP726", f"lora.rank = {lora.rank}, but {given}", key, instead)


def _named(checked: Checked, lora: Lora) -> Iterator[Diagnostic]:
    """Every entry of `lora.families` must name a linear, and some linear must be adapted."""
    linears = _linears(checked)
    known = {letter: list(names) for letter, names in linears.items() if names}
    every = dict.fromkeys(name for names in known.values() for name in names)
    for index, entry in enumerate(lora.families or ()):
        if entry not in known and entry not in every and entry not in {name.rpartition(".")[2] for name in every}:
            detail = f"lora.families names {entry}; {_shown(known)}"
            yield checked.error("MP725", detail, f"lora.families[{index}]", "families: null")
    if not known:
        yield checked.error("MP725", f"lora.rank = {lora.rank}; {_shown(known)}", "lora", "remove lora")


def _cut_blocks(checked: Checked, lora: Lora) -> Iterator[Diagnostic]:
    """A TP rank's columns must consist of whole blocks, so that a weight's values are the same under every layout."""
    tp, block = checked.spec.mesh.tp, lora.base_block
    if lora.base is None or tp == 1:
        return
    for letter, tensors in _tensors(checked):
        for tensor in tensors:
            own = tensor.shape[-1] // tp
            if tensor.tp_dim == 1 and adaptable(tensor) is not None and own % block:
                detail = f"{tensor.name} of {letter} has {own} columns on each of {tp} tensor ranks, and lora.base_block = {block}"
                yield checked.error("MP508", detail, "lora.base_block", "use a divisor of the columns, or base: null")
                return


def _linears(checked: Checked) -> dict[str, dict[str, None]]:
    """The linears that can be adapted, by letter of the pattern."""
    found: dict[str, dict[str, None]] = {}
    for letter, tensors in _tensors(checked):
        found.setdefault(letter, {}).update(dict.fromkeys(name for tensor in tensors if (name := adaptable(tensor)) is not None))
    return found


def _tensors(checked: Checked) -> Iterator[tuple[str, tuple[ParamTensor, ...]]]:
    """The letter and the tensors of each layer; missing sections are reported elsewhere."""
    model = checked.spec.model
    letters = checked.letters or ""
    for index, letter in enumerate(letters):
        family = FAMILIES[letter]
        section = getattr(model, family.section)
        if section is None:
            continue
        yield letter, family.tensors(section, model.hidden_size, family.variant(section, index, letters[:index].count(letter)))


def _shown(known: dict[str, list[str]]) -> str:
    if not known:
        return "no layer of the pattern has a linear that can be adapted"
    return "linears that can be adapted: " + "; ".join(f"{letter} has {series(names, 'and')}" for letter, names in known.items())


def _unsupported(checked: Checked, lora: Lora) -> Iterator[tuple[str, str, str]]:
    """Each setting that lora does not support: its key, its value, and the value to write instead."""
    spec = checked.spec
    model, precision = spec.model, spec.precision
    if model.features.mtp is not None:
        yield (
            "model.features.mtp",
            f"model.features.mtp.depth = {model.features.mtp.depth}: its loss trains the depths themselves",
            "mtp: null",
        )
    if getattr(model.attention, "indexer", None) is not None:
        yield "model.attention.indexer", "model.attention.indexer is given: it is trained by a separate loss", "indexer: null"
    if model.features.relation_bias is not None:
        yield "model.features.relation_bias", "model.features.relation_bias is given: no frozen form of it is priced", "relation_bias: null"
    if precision.recipe is not None:
        yield (
            "precision.recipe",
            f"precision.recipe.name = {precision.recipe.name}: copies of frozen weights are not priced",
            "recipe: null",
        )
    if precision.families:
        written = ", ".join(f"{letter}: {dtype}" for letter, dtype in precision.families.items())
        yield "precision.families", f"precision.families = {{{written}}}: frozen parameters have one dtype", "families: {}"
    if lora.dtype is not None and lora.dtype not in (precision.params, precision.master):
        given = f"lora.dtype = {lora.dtype}: frozen parameters are stored in precision.params or precision.master"
        yield "lora.dtype", f"{given} (precision.params = {precision.params}, precision.master = {precision.master})", "dtype: null"


def policy_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP504, MP506, MP720 and MP721."""
    if checked.pattern is not None:
        yield from _recompute(checked)
        yield from _absent_letters(checked, checked.pattern)
    yield from _device(checked)


def _recompute(checked: Checked) -> Iterator[Diagnostic]:
    if checked.spec.host.kind.block_layers > 1:  # checkpoints contain full blocks, so a dispatch would be recomputed
        return
    for letter, family in FAMILIES.items():
        policy = checked.spec.recompute.of(letter)
        if checked.has(letter) and policy == "full" and family.full_refused is not None:
            written = letter in checked.spec.recompute.blocks
            key = f"recompute.blocks.{letter}" if written else "recompute.default"
            detail = f"{key} = {policy}, but {plural(checked.count(letter), 'layer')} of {letter} refuse it: {family.full_refused}"
            yield checked.error("MP720", detail, key, f"blocks: {{{letter}: selective}}")


def _absent_letters(checked: Checked, pattern: Pattern) -> Iterator[Diagnostic]:
    for section, letters in (("recompute.blocks", checked.spec.recompute.blocks), ("precision.families", checked.spec.precision.families)):
        for letter, value in letters.items():
            if not checked.has(letter):
                present = series(list(pattern.counts()), "and")
                detail = f"{section}.{letter} = {value}, but the pattern's letters are {present}"
                yield checked.error("MP721", detail, f"{section}.{letter}", f"remove {section}.{letter}")


def _device(checked: Checked) -> Iterator[Diagnostic]:
    device = checked.spec.device
    if device.name not in device_names():
        try:
            load_device(device.name)
        except MegaplanError as error:
            yield from (checked.error(found.code, found.detail, "device.name", *found.hints[:-1]) for found in error.diagnostics)
        return
    kind = checked.spec.host.kind
    if load_device(device.name).generation == TPU and not kind.xla:
        able = next(host.name for host in HOSTS.values() if host.xla)
        detail = f"device.name = {device.name}, host.name = {kind.name}: it runs on GPUs, not on a TPU"
        yield checked.error("MP902", detail, "device.name", f"host: {{name: {able}}}", "device: {name: h200}")
    peaks, precision = device_of(device).peak_flops, checked.spec.precision
    for key, dtype in (("params", precision.params), *((f"families.{letter}", dtype) for letter, dtype in precision.families.items())):
        if dtype not in peaks:
            detail = f"precision.{key} = {dtype}, but {device.name} multiplies {series(list(peaks), 'and')}"
            yield checked.error(
                "MP506", detail, f"precision.{key}", f"{key.rpartition('.')[2]}: bf16", f"peak_flops: {{{dtype}: 312000000000000}}"
            )


def _other_devices(checked: Checked) -> Iterator[Diagnostic]:
    """Yields the findings of a device's rules for the pools' devices."""
    groups = (_device, low_precision_rules, _libraries)
    known = [(found.code, found.detail) for rules in groups if checked.spec.pools for found in rules(checked)]
    for part in parts_of(checked.spec)[1:] if not any(pool_rules(checked)) else ():
        other = checked._replace(spec=part.spec)
        yield from (found for rules in groups for found in rules(other) if (found.code, found.detail) not in known)


def schedule_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP212 and MP311 … MP313."""
    spec = checked.spec
    mesh, schedule, layers = spec.mesh, spec.schedule, spec.model.num_layers
    slots = mesh.num_slots
    if slots > layers and not (spec.host.kind.empty_slots and (has_boundaries(spec.model.pattern) or spec.split.spans)):
        detail = f"mesh.pp · mesh.vpp = {mesh.pp} · {mesh.vpp} = {slots} slots, model.num_layers = {layers}, and {slots} > {layers}"
        yield checked.error("MP212", detail, "mesh.pp", f"use at most {layers} slots")
    few = spec.host.kind.few_microbatches
    for problem in schedule_problems(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches, planned=True, few=few):
        yield checked.error(problem.code, problem.detail, problem.key, *problem.hints)


LARGEST_RATE = 1.0
"""Above this rate one update is as large as the parameters, which are initialised below 1."""


def training_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP722 and MP729."""
    training = checked.spec.training
    for name in ("learning_rate", "muon_learning_rate"):
        rate = getattr(training, name)
        if rate is not None and rate > LARGEST_RATE:
            detail = f"training.{name} = {rate:g}, above {LARGEST_RATE:g}: one update moves a parameter by about the rate"
            yield checked.warning("MP729", detail, f"training.{name}", f"{name}: 3.0e-4")
    schedule, steps = training.rate_schedule, training.steps
    warm_up = warm_up_steps(schedule, steps)
    parts = {"warmup_steps": warm_up}
    if isinstance(schedule, StableRate):
        parts["decay_steps"] = schedule.decay_steps
    total = sum(parts.values())
    if total > steps:
        written = " + ".join(parts) if len(parts) > 1 else "warmup_steps"
        values = f" = {' + '.join(map(str, parts.values()))}" if len(parts) > 1 else ""
        detail = f"training.rate_schedule: {written}{values} = {total}, but training.steps = {steps}"
        last = list(parts)[-1]
        shorter = steps - (total - parts[last])
        hint = f"{last}: {shorter}" if shorter >= 1 else f"steps: {total}"
        yield checked.error("MP722", detail, f"training.rate_schedule.{last}", hint)


def check_rules(spec: Spec, locate: Locate = NOWHERE.locate) -> list[Diagnostic]:
    """Errors and warnings of a typed spec, errors first.

    Args:
        spec: A spec whose values are typed and within their bounds.
        locate: Position of a dotted key.
    """
    found = list(_all_rules(spec, locate))
    return sorted(found, key=lambda item: item.severity is not Severity.ERROR)


def _all_rules(spec: Spec, locate: Locate) -> Iterator[Diagnostic]:
    pattern = None
    try:
        pattern = parse_pattern(spec.model.pattern, spec.model.num_layers, locate("model.pattern"))
    except MegaplanError as error:
        yield from error.diagnostics
    checked = Checked(spec, pattern, locate)
    groups = (
        pattern_rules,
        model_rules,
        mesh_rules,
        schedule_rules,
        split_rules,
        policy_rules,
        low_precision_rules,
        lora_rules,
        training_rules,
        serving_rules,
        host_rules,
        pool_rules,
        _other_devices,
    )
    for rules in groups:
        yield from rules(checked)
    if spec.post_training is not None:
        from megaplan.spec.post_training_rules import post_training_rules  # noqa: PLC0415  (few specs have the section)

        yield from post_training_rules(checked)
