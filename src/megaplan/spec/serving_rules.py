"""Rules of serving: its degrees must divide the model, and only pages can be shared."""

from collections.abc import Iterator
from math import gcd

from megaplan.errors import Diagnostic
from megaplan.families.checks import divisors, remainder, use_one_of
from megaplan.spec.context import Checked
from megaplan.spec.mesh_rules import sharded_by_blocks
from megaplan.spec.models import Serving

KEY_VALUE_HEADS = "attention.num_kv_heads"


def serving_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP218 and MP219. A degree that is not given is the mesh's, which the rules of the mesh check."""
    serving = checked.spec.serving
    if serving is None:
        return
    yield from _tensor(checked, serving)
    yield from _experts(checked, serving)
    layers = checked.spec.model.num_layers
    if serving.pp is not None and serving.pp > layers:
        yield checked.error("MP218", f"serving.pp = {serving.pp}, but the model has {layers} layers", "serving.pp", f"pp: {layers}")
    if serving.shared_prefix and serving.cache != "paged":
        detail = f"serving.shared_prefix = {serving.shared_prefix}, but serving.cache = {serving.cache} has a region for each sequence"
        yield checked.error("MP219", detail, "serving.shared_prefix", "serving: {cache: paged}")
    if serving.shared_prefix > serving.context_length:
        detail = f"serving.shared_prefix = {serving.shared_prefix}, above serving.context_length = {serving.context_length}"
        yield checked.error("MP219", detail, "serving.shared_prefix", f"shared_prefix: {serving.context_length}")


def _tensor(checked: Checked, serving: Serving) -> Iterator[Diagnostic]:
    degree = serving.tp
    if degree is None:
        return
    counts = sharded_by_blocks(checked.spec)
    heads = counts.pop(KEY_VALUE_HEADS, 0)
    broken = {name: count for name, count in counts.items() if count % degree}
    if heads % degree and degree % heads:  # otherwise each rank has its own head, or several ranks share one
        broken[KEY_VALUE_HEADS] = heads
    if broken:
        usable = [each for each in divisors(gcd(*counts.values())) if heads % each == 0 or each % heads == 0]
        detail = "\n".join(remainder(name, count, "serving.tp", degree) for name, count in broken.items())
        yield checked.error("MP218", detail, "serving.tp", use_one_of(usable))


def _experts(checked: Checked, serving: Serving) -> Iterator[Diagnostic]:
    moe, spec = checked.spec.model.moe, checked.spec
    tp, ep = serving.tp or spec.mesh.tp, serving.ep or spec.mesh.ep
    if serving.ep is not None and serving.ep > 1 and (moe is None or (checked.pattern is not None and not checked.has("E"))):
        yield checked.error("MP218", f"serving.ep = {serving.ep}, but the pattern has no E block to distribute", "serving.ep", "ep: 1")
        return
    if moe is None or serving.tp is None is serving.ep:
        return
    if moe.num_experts % ep:
        detail = remainder("moe.num_experts", moe.num_experts, "serving.ep", ep)
        yield checked.error("MP218", detail, "serving.ep", use_one_of(divisors(moe.num_experts)))
    elif max(tp, ep) % min(tp, ep) or moe.ffn_hidden_size % max(tp // ep, 1):
        width = f"tp / ep must divide moe.ffn_hidden_size = {moe.ffn_hidden_size}"
        detail = f"serving.tp = {tp} and serving.ep = {ep}: one must divide the other, and {width}"
        yield checked.error(
            "MP218", detail, "serving.ep" if serving.ep else "serving.tp", f"ep: {tp}" if moe.num_experts % tp == 0 else "ep: 1"
        )
