"""Rules of a stated encoder and its projection (MP226), and of parts that state nothing (MP715)."""

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.checks import rising
from megaplan.spec.context import Checked
from megaplan.spec.towers import Encoder, Projection, Towers, grid_fault

VISION, PROJECTOR = "model.towers.vision.encoder", "model.towers.projector.projection"


def tower_rules(checked: Checked, towers: Towers) -> Iterator[Diagnostic]:
    """Yields MP226 and MP715."""
    stated = towers.stated
    given = {VISION: towers.vision and towers.vision.encoder, PROJECTOR: towers.projector and towers.projector.projection}
    for key, section in given.items():
        part = key.rpartition(".")[0]
        found = towers.given.get(part.rpartition(".")[2])
        if found is not None and found.parameters is None and section is None:
            yield checked.error("MP715", f"{part} needs parameters or {key.rpartition('.')[2]}", part, f"{part}: null")
    if stated is None:
        for key, section in given.items():
            if section is not None:
                other = PROJECTOR if key == VISION else VISION
                detail = f"{key} is given but {other} is not: an encoder's output needs a projection to the text model"
                yield checked.error("MP226", detail, key, f"state {other}, too, or give parameters instead")
        yield from unused_images(checked)
        return
    yield from _widths(checked, *stated)
    yield from _layers(checked, stated[0])
    yield from _places(checked, *stated)
    if fault := grid_fault(*stated):
        detail = f"grid = {' by '.join(map(str, stated[0].grid or ()))}, and {fault}"
        yield checked.error("MP226", detail, f"{VISION}.grid", "grid: null")


def unused_images(checked: Checked) -> Iterator[Diagnostic]:
    """Settings that only a stated encoder reads."""
    spec = checked.spec
    for key, value, default in (
        ("batch.images", spec.batch.images, 1),
        ("recompute.towers", spec.recompute.towers, "none"),
        ("mesh.towers", spec.mesh.towers, "whole"),
    ):
        if value != default:
            detail = f"{key} = {value}, but no encoder is stated: nothing reads it"
            yield checked.error("MP226", detail, key, f"--set {key}={default}")


def _widths(checked: Checked, encoder: Encoder, projection: Projection) -> Iterator[Diagnostic]:
    joined = encoder.hidden_size * projection.joined_patches
    first, *_, last = projection.widths
    if first != joined:
        detail = (
            f"widths[0] = {first:,}, but {projection.joined_patches} joined patches of width {encoder.hidden_size:,} are {joined:,} wide"
        )
        yield checked.error("MP226", detail, f"{PROJECTOR}.widths", f"widths: [{joined}, ...]")
    if last != checked.spec.model.hidden_size:
        detail = f"the last width is {last:,}, and model.hidden_size = {checked.spec.model.hidden_size:,}"
        yield checked.error("MP226", detail, f"{PROJECTOR}.widths", f"widths: [..., {checked.spec.model.hidden_size}]")


def _layers(checked: Checked, encoder: Encoder) -> Iterator[Diagnostic]:
    groups, window = encoder.num_kv_heads, encoder.window_patches
    if groups is not None and encoder.num_heads % groups:
        detail = f"num_heads = {encoder.num_heads}, num_kv_heads = {groups}: each key-value head needs the same number of query heads"
        yield checked.error("MP226", detail, f"{VISION}.num_kv_heads", f"num_kv_heads: {encoder.num_heads}")
    if encoder.rotary and encoder.head_dim % 2:
        detail = f"head_dim = {encoder.head_dim} is odd, but rotary embedding rotates pairs"
        yield checked.error("MP226", detail, f"{VISION}.head_dim", "rotary: false")
    yield from rising(checked, f"{VISION}.full_layers", encoder.full_layers)
    if encoder.full_layers and (window is None or max(encoder.full_layers) >= encoder.num_layers):
        detail = f"full_layers has {max(encoder.full_layers)}, with num_layers = {encoder.num_layers} and window_patches = {window}"
        yield checked.error("MP226", detail, f"{VISION}.full_layers", "full_layers: []")
    if window is not None and encoder.patches % window:
        detail = f"patches = {encoder.patches:,} are not a multiple of the window of {window:,}"
        yield checked.error("MP226", detail, f"{VISION}.patches", f"patches: {-(-encoder.patches // window) * window}")


def _places(checked: Checked, encoder: Encoder, projection: Projection) -> Iterator[Diagnostic]:
    each, batch = projection.patches_per_token, checked.spec.batch
    if encoder.positions is not None and encoder.positions < encoder.patches:
        detail = f"patches = {encoder.patches:,}, but positions = {encoder.positions:,} rows for them"
        yield checked.error("MP226", detail, f"{VISION}.positions", f"positions: {encoder.patches}")
    if encoder.patches % each:
        detail = f"patches = {encoder.patches:,}, but a token of text takes {each}"
        yield checked.error("MP226", detail, f"{VISION}.patches", f"patches: {-(-encoder.patches // each) * each}")
        return
    tokens = batch.images * encoder.patches // each
    if tokens > batch.seq_length:
        detail = f"{batch.images} images of {encoder.patches // each:,} tokens are {tokens:,}, and batch.seq_length = {batch.seq_length:,}"
        yield checked.error("MP226", detail, "batch.seq_length", f"--set batch.seq_length={tokens}")
