"""Rules of the model: the pattern, then dimensions of each family, norms and parallel layers, features."""

from collections.abc import Iterator, Mapping
from itertools import combinations

from megaplan.errors import Diagnostic
from megaplan.families.checks import rising
from megaplan.families.linear_attention.section import MatrixLstm
from megaplan.families.registry import FAMILIES, families_of
from megaplan.scalars import GATED
from megaplan.spec.context import Checked
from megaplan.spec.models import SIDES, GroupedQueryAttention
from megaplan.spec.pattern import BOUNDARY, Pattern, empty_slots, has_boundaries
from megaplan.spec.tower_rules import tower_rules, unused_images
from megaplan.wording import plural, quoted


def pattern_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Letters need sections, boundaries must match slots (R-1, R-2): yields MP302, MP305, MP307, MP308 and MP309."""
    if checked.pattern is None:
        return
    if not checked.spec.host.kind.empty_slots:
        yield from empty_slots(checked.spec.model.pattern, checked.locate("model.pattern"))
    yield from _sections(checked, checked.pattern)
    yield from _unused_letters(checked, checked.pattern)
    slots, mesh = checked.spec.mesh.num_slots, checked.spec.mesh
    boundaries = checked.pattern.text.count(BOUNDARY)
    if boundaries and boundaries != slots - 1:
        product = f"mesh.pp · mesh.vpp = {mesh.pp} · {mesh.vpp} = {slots} slots"
        detail = f"model.pattern has {boundaries} '|', {product}, and {slots} − 1 = {slots - 1}"
        fit = f"pp: {(boundaries + 1) // mesh.vpp}" if (boundaries + 1) % mesh.vpp == 0 else f"vpp: 1 and pp: {boundaries + 1}"
        yield checked.error("MP302", detail, "model.pattern", f"write {slots - 1} '|', or set {fit} under mesh")


def _sections(checked: Checked, pattern: Pattern) -> Iterator[Diagnostic]:
    text = quoted(pattern.text)
    for letter, family in FAMILIES.items():
        name = family.section
        present = getattr(checked.spec.model, name) is not None
        if letter in pattern.layers and not present:
            detail = f"layer {pattern.layers.index(letter)} of {text} is {letter}, and model.{name} is absent"
            yield checked.error("MP307", detail, "model.pattern", f"add model.{name}, or take {letter} out of the pattern")
        if present and letter not in pattern.layers:
            detail = f"model.{name} is given, but there is no {letter} among the {plural(len(pattern.layers), 'layer')} of {text}"
            late = pattern.text.find(letter)
            hint = f"num_layers: {late + 1} or more reaches the first {letter}" if late >= 0 else f"remove model.{name}"
            yield checked.error("MP308", detail, f"model.{name}", hint)


def _unused_letters(checked: Checked, pattern: Pattern) -> Iterator[Diagnostic]:
    letters, layers = len(pattern.text), len(pattern.layers)
    if not has_boundaries(pattern.text) and letters > layers:
        detail = f"model.pattern has {letters} letters, model.num_layers = {layers}, and the last {letters - layers} build nothing"
        yield checked.warning("MP309", detail, "model.pattern", f"pattern: {pattern.layers}" if layers <= 60 else "shorten the pattern")


def model_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP225, MP226, MP332, MP701 … MP715 and MP729."""
    for family, section in families_of(checked.spec.model):
        yield from family.rules(checked, section)
        yield from _taps(checked, f"model.{family.section}.conv_kernel", getattr(section, "conv_kernel", None))
    yield from _parallel_layers(checked)
    yield from _post_norms(checked)
    yield from _norms(checked)
    yield from _norm_gates(checked)
    yield from _streams(checked)
    yield from _attention_residuals(checked)
    yield from _multipliers(checked)
    yield from _features(checked)
    yield from _towers(checked)


def _towers(checked: Checked) -> Iterator[Diagnostic]:
    """Rules of encoders, and the note on parts that a count of parameters excludes."""
    towers = checked.spec.model.towers
    if towers is None:
        yield from unused_images(checked)
        return
    parts = towers.given
    if not parts:
        yield checked.error("MP715", "model.towers names no part", "model.towers", "towers: null")
        return
    yield from tower_rules(checked, towers)
    counted = towers.counted
    if not counted:
        return
    listed = "\n".join(f"{name}: {size:,} parameters, {'trained' if towers.trains(name) else 'frozen'}" for name, size in counted.items())
    missing = (
        "counted on the first stage, in parameters, gradients and moments; their activations, gathered copies and FLOPs are not priced"
    )
    frozen = [f"--set model.towers.{name}.trained=true" for name, part in parts.items() if not part.trained]
    yield checked.note("MP225", f"{listed}\n{missing}", "model.towers", *frozen)


def _taps(checked: Checked, key: str, taps: int | None) -> Iterator[Diagnostic]:
    length = checked.spec.batch.seq_length
    if taps is not None and taps > length:
        detail = f"{key} = {taps:,}, batch.seq_length = {length:,}: {taps - length:,} taps never meet a token, and stay as initialised"
        yield checked.warning("MP729", detail, key, "conv_kernel: 4")


def _parallel_layers(checked: Checked) -> Iterator[Diagnostic]:
    model, key = checked.spec.model, "model.parallel_layers"
    layers = model.parallel_layers
    yield from rising(checked, key, layers)
    wrong = [layer for layer in layers if not 0 < layer < model.num_layers]
    if wrong:
        detail = f"parallel_layers has {wrong[0]}, and a layer that shares the input of the one before is from 1 to {model.num_layers - 1}"
        yield checked.error("MP715", detail, key, f"use layers from 1 to {model.num_layers - 1}")
    if layers and model.norm_placement != "pre":
        detail = f"parallel_layers is given, norm_placement = {model.norm_placement}: parallel layers share the norm before a block"
        yield checked.error("MP715", detail, key, "norm_placement: pre")


PLACED = ("post_norm_layers", "added_norm_layers", "unnormed_layers")
"""Lists of layers whose norms are placed differently from the model's."""


def _post_norms(checked: Checked) -> Iterator[Diagnostic]:
    model = checked.spec.model
    for name in PLACED:
        key, layers = f"model.{name}", getattr(model, name)
        yield from rising(checked, key, layers)
        if layers and layers[-1] >= model.num_layers:
            detail = f"{name} has {layers[-1]}, num_layers = {model.num_layers}, and a layer is from 0 to {model.num_layers - 1}"
            yield checked.error("MP715", detail, key, f"use layers below {model.num_layers}")
        if layers and model.norm_placement != "pre":
            detail = f"{name} is given, norm_placement = {model.norm_placement}: the other layers have a norm before them"
            yield checked.error("MP715", detail, key, "norm_placement: pre")
        if set(layers) & {*model.parallel_layers, *(each - 1 for each in model.parallel_layers)}:
            detail = f"a layer of {name} is in parallel_layers, or before one that is: parallel layers share the norm before a block"
            yield checked.error("MP715", detail, key, "parallel_layers: []")
    for one, other in combinations(PLACED, 2):
        if both := sorted(set(getattr(model, one)) & set(getattr(model, other))):
            detail = f"layer {both[0]} is in {one} and in {other}"
            yield checked.error("MP715", detail, f"model.{other}", f"remove {both[0]} from one of the lists")
    if model.unnormed_layers and model.parallel_layers:
        detail = "unnormed_layers and parallel_layers are both given, but only one of them can describe a layer without its own norm"
        yield checked.error("MP715", detail, "model.unnormed_layers", "parallel_layers: []")


def _norm_gates(checked: Checked) -> Iterator[Diagnostic]:
    """Checks that gates belong to norms before a block that reads them alone, and that prediction depths add as the layers do."""
    model, key = checked.spec.model, "model.norm_gate"
    layers = () if model.norm_gate is None else model.norm_gate.layers
    yield from rising(checked, key, layers)
    if layers and layers[-1] >= model.num_layers:
        detail = f"norm_gate.layers has {layers[-1]}, num_layers = {model.num_layers}, and a layer is from 0 to {model.num_layers - 1}"
        yield checked.error("MP715", detail, key, f"use layers below {model.num_layers}")
    others = {*model.parallel_layers, *(each - 1 for each in model.parallel_layers), *model.post_norm_layers, *model.unnormed_layers}
    if layers and (model.norm_placement == "post" or set(layers) & others):
        detail = "a layer of norm_gate.layers has no norm before it that it alone reads (norm_placement, parallel_layers, post_norm_layers)"
        yield checked.error("MP715", detail, key, "remove the layer")
    if model.stream_scale and (model.features.mtp is not None or model.streams is not None):
        detail = (
            f"stream_scale = true, and {'streams' if model.streams is not None else 'features.mtp'} is given, which adds without factors"
        )
        yield checked.error("MP715", detail, "model.stream_scale", "stream_scale: false")


def _streams(checked: Checked) -> Iterator[Diagnostic]:
    """Checks that no other part reads or makes the one stream that a model without hyper-connections has."""
    model = checked.spec.model
    if model.streams is None:
        return
    given = {
        "features.mtp": model.features.mtp is not None,
        **{f"features.{name}": True for name in model.features.sides},
        "towers": model.towers is not None and model.towers.stated,
        "parallel_layers": bool(model.parallel_layers),
        "learned_positions": model.learned_positions is not None,
    }
    detail = f"model.streams.count = {model.streams.count}, but model.{{}} is given, which has one stream"
    yield from _without(checked, "model.streams", given, detail, "remove model.{}, or model.streams")


def _attention_residuals(checked: Checked) -> Iterator[Diagnostic]:
    """Checks that no other part reads or makes the residual stream that a model with attention residuals does not have."""
    model, key = checked.spec.model, "model.attention_residuals"
    if model.attention_residuals is None:
        return
    given = {
        "streams": model.streams is not None,
        "features.mtp": model.features.mtp is not None,
        "features.layer_embeddings": model.features.layer_embeddings is not None,
        "parallel_layers": bool(model.parallel_layers),
        "stream_scale": model.stream_scale,
    }
    detail = "attention_residuals is given, and model.{}, which belongs to a residual stream"
    yield from _without(checked, key, given, detail, "remove model.{}, or model.attention_residuals")


def _without(checked: Checked, key: str, given: Mapping[str, object], detail: str, fix: str) -> Iterator[Diagnostic]:
    """MP715 for each part of the model that is given and that a key excludes; `detail` and `fix` have a place for its name."""
    for name in (name for name, is_given in given.items() if is_given):
        yield checked.error("MP715", detail.format(name), key, fix.format(name))


def _head_biases(checked: Checked) -> Iterator[Diagnostic]:
    """Checks that a tied head and an untied head have their own kind of bias."""
    model = checked.spec.model
    if model.head_bias and model.tie_embeddings:
        yield checked.error("MP715", "head_bias = true, tie_embeddings = true: a tied head has no separate tensor", "model.head_bias")
    if model.head_layer is not None and model.head_layer.logits_bias and not model.tie_embeddings:
        detail = "head_layer.logits_bias = true, tie_embeddings = false: the bias of an untied head is head_bias"
        yield checked.error("MP715", detail, "model.head_layer", "head_bias: true, without head_layer.logits_bias")


def _norms(checked: Checked) -> Iterator[Diagnostic]:
    model, mesh = checked.spec.model, checked.spec.mesh
    yield from _head_biases(checked)
    if model.zero_centered_norm:
        yield from _zero_centered(checked)
    lists = [name for name in ("parallel_layers", *PLACED, "norm_gate") if getattr(model, name)]
    if model.norm == "rmsnorm_no_scale" and lists:
        yield checked.error(
            "MP715", f"norm = {model.norm}, and {lists[0]} is given: all blocks have one form", "model.norm", "norm: rmsnorm"
        )
    if model.embedding_norm and model.tie_embeddings and mesh.pp > 1:
        detail = f"embedding_norm = true, tie_embeddings = true, mesh.pp = {mesh.pp}: the last stage's copy of the norm is not priced"
        yield checked.error("MP715", detail, "model.embedding_norm", "mesh: {pp: 1}, or tie_embeddings: false")
    if checked.spec.host.kind.own_layers:
        return
    rows, length = model.learned_positions, checked.spec.batch.seq_length
    if rows is not None and rows < length:
        detail = f"learned_positions = {rows}, batch.seq_length = {length}, and {rows} < {length}"
        yield checked.error("MP715", detail, "model.learned_positions", f"seq_length: {rows}, or more positions")
    if rows is not None and model.tie_embeddings and mesh.pp > 1:
        detail = f"learned_positions = {rows}, tie_embeddings = true, mesh.pp = {mesh.pp}: the last stage's copy of the table is not priced"
        yield checked.error("MP715", detail, "model.learned_positions", "mesh: {pp: 1}, or tie_embeddings: false")
    if model.features.mtp is None:
        return
    for name, plain in (
        ("head_layer", None),
        ("unnormed_layers", ()),
        ("norm", "rmsnorm"),
        ("norm_placement", "pre"),
        ("embedding_norm", False),
        ("head_bias", False),
        ("learned_positions", None),
        ("embedding_multiplier", 1.0),
        ("logits_multiplier", 1.0),
        ("logits_cap", None),
    ):
        if (value := getattr(model, name)) != plain:
            detail = (
                f"{name} = {value}, but features.mtp is given, whose modules have RMSNorm before each block, a plain head and embedding"
            )
            yield checked.error("MP715", detail, "model.features.mtp", f"remove features.mtp, or {name}")


def _multipliers(checked: Checked) -> Iterator[Diagnostic]:
    model = checked.spec.model
    if model.logits_multiplier != 1 and model.head_bias:
        detail = (
            f"logits_multiplier = {model.logits_multiplier:g}, head_bias = true: the product of the head is scaled, but its bias is not"
        )
        yield checked.error("MP715", detail, "model.logits_multiplier", "head_bias: false")
    if model.mlp is not None and model.mlp.gate_multiplier != 1 and model.mlp.activation not in GATED:
        detail = f"mlp.gate_multiplier = {model.mlp.gate_multiplier:g}, mlp.activation = {model.mlp.activation}, which has no gate"
        yield checked.error("MP715", detail, "model.mlp.gate_multiplier", "activation: swiglu")
    attention = model.attention
    if attention is not None and attention.output_multiplier != 1 and model.features.mtp is not None:
        detail = (
            f"attention.output_multiplier = {attention.output_multiplier:g}, but features.mtp is given, whose blocks have no multiplier"
        )
        yield checked.error("MP715", detail, "model.features.mtp", "remove features.mtp, or attention.output_multiplier")


def _zero_centered(checked: Checked) -> Iterator[Diagnostic]:
    model, key = checked.spec.model, "model.zero_centered_norm"
    if model.norm != "rmsnorm":
        yield checked.error("MP715", f"zero_centered_norm = true, norm = {model.norm}: it is of RMSNorm", key, "norm: rmsnorm")
    if isinstance(model.attention, GroupedQueryAttention) and model.attention.qk_norm and model.attention.qk_norm_width == "all_heads":
        detail = "zero_centered_norm = true, attention.qk_norm_width = all_heads: norms over all heads scale by their weight alone"
        yield checked.error("MP715", detail, key, "qk_norm_width: head")


def _features(checked: Checked) -> Iterator[Diagnostic]:
    features = checked.spec.model.features
    yield from _depths(checked)
    yield from _layer_embeddings(checked)
    yield from _linear_states(checked)
    if features.relation_bias is not None and checked.pattern is not None and not checked.has("A"):
        detail = f"features.relation_bias is given, and the {plural(len(checked.pattern.layers), 'layer')} have no A"
        yield checked.error("MP709", detail, "model.features.relation_bias", "remove features.relation_bias, or add A to the pattern")
    attention = checked.spec.model.attention
    name = "layer_heads" if isinstance(attention, GroupedQueryAttention) else "layer_latents"
    others = getattr(attention, name, ())
    if features.relation_bias is not None and any(own.num_heads not in (None, attention and attention.num_heads) for own in others):
        detail = f"attention.{name} has other num_heads, and features.relation_bias is a table with one value for each head of a layer"
        yield checked.error("MP715", detail, f"model.attention.{name}", "remove features.relation_bias, or num_heads there")
    if features.mtp is not None and features.mtp.side_embeddings and not features.sides:
        detail = f"features.mtp.side_embeddings = true, but the model has none of {', '.join(SIDES)}"
        yield checked.error("MP715", detail, "model.features.mtp.side_embeddings", "side_embeddings: false")
    ngram = features.ngram
    if ngram is not None and ngram.num_rows < ngram.num_tables:
        rows, tables = ngram.num_rows, ngram.num_tables
        detail = f"features.ngram.num_rows = {rows}, features.ngram.num_tables = {tables}, and {rows} < {tables}"
        yield checked.error("MP710", detail, "model.features.ngram.num_rows", "num_rows counts the rows of all tables together")


def _linear_states(checked: Checked) -> Iterator[Diagnostic]:
    """Checks that no context group shares a sequence whose states mLSTM carries."""
    linear, cp = checked.spec.model.linear_attention, checked.spec.mesh.cp
    if isinstance(linear, MatrixLstm) and cp > 1:
        detail = f"linear_attention.kind = {linear.kind}, mesh.cp = {cp}: its states are not handed between ranks"
        yield checked.error("MP715", detail, "model.linear_attention.kind", "mesh: {cp: 1}")


def _layer_embeddings(checked: Checked) -> Iterator[Diagnostic]:
    """Checks that layers which add embeddings are on the first stage, and that their stream has one form."""
    model, key, pp = checked.spec.model, "model.features.layer_embeddings", checked.spec.mesh.pp
    embeddings = model.features.layer_embeddings
    if embeddings is None:
        return
    yield from rising(checked, key, embeddings.layers)
    if embeddings.layers[-1] >= model.num_layers:
        detail = f"layer_embeddings.layers has {embeddings.layers[-1]}, num_layers = {model.num_layers}"
        yield checked.error("MP715", detail, key, f"use layers below {model.num_layers}")
    others = {
        "streams": model.streams is not None,
        "parallel_layers": bool(model.parallel_layers),
        "features.mtp": bool(model.features.mtp),
    }
    yield from _without(checked, key, others, "features.layer_embeddings is given, and model.{}", "remove model.{}")
    if pp > 1:
        detail = f"features.layer_embeddings is given, mesh.pp = {pp}: no stage hands embeddings of layers on"
        yield checked.error("MP715", detail, key, "mesh: {pp: 1}")


def _depths(checked: Checked) -> Iterator[Diagnostic]:
    """Checks the blocks of prediction modules. All except D have the model's dimensions, whose sections the layers have checked."""
    mtp, key = checked.spec.model.features.mtp, "model.features.mtp.pattern"
    if mtp is None or checked.pattern is None:
        return
    if mtp.pattern is not None and mtp.experts:
        yield checked.error(
            "MP715", f"features.mtp.pattern = {mtp.pattern}, experts = true: the pattern says which blocks", key, "experts: false"
        )
    layers = plural(len(checked.pattern.layers), "layer")
    for letter in dict.fromkeys(mtp.letters):
        if letter not in FAMILIES:
            detail = f"features.mtp.pattern = {mtp.pattern}: '{letter}' is not a block"
            yield checked.error("MP715", detail, key, f"one of {', '.join(FAMILIES)} for each block")
        elif letter != "D" and not checked.has(letter):
            given = "features.mtp is given" if mtp.pattern is None else f"features.mtp.pattern = {mtp.pattern}"
            where = "model.features.mtp" if mtp.pattern is None else key
            yield checked.error(
                "MP709", f"{given}, and the {layers} have no {letter}", where, f"remove features.mtp, or add {letter} to the pattern"
            )
    if mtp.letters.count("E") > 1:
        detail = f"features.mtp.pattern = {mtp.pattern}: a module's group gathers one bank of experts"
        yield checked.error("MP715", detail, key, "a pattern with one E")
