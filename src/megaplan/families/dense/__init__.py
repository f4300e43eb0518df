"""D blocks: the dense MLP."""

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.checks import CheckedSpec, rising
from megaplan.families.dense.program import dense_program, dense_selective, dense_work
from megaplan.families.dense.section import Mlp
from megaplan.families.dense.tensors import dense_tensors
from megaplan.families.family import Family


def _sharded(mlp: Mlp, _hidden_size: int) -> dict[str, int]:
    own = {f"mlp.layer_widths[{place}].ffn_hidden_size": each.ffn_hidden_size for place, each in enumerate(mlp.layer_widths)}
    return {"mlp.ffn_hidden_size": mlp.ffn_hidden_size, **own}


def _rules(checked: CheckedSpec, mlp: Mlp) -> Iterator[Diagnostic]:
    """Yields MP706 and MP715."""
    key, seen = "model.mlp.layer_widths", set[int]()
    for own in mlp.layer_widths:
        yield from rising(checked, key, own.layers)
        wrong = [layer for layer in own.layers if checked.letters is not None and checked.letters[layer : layer + 1] != "D"]
        if wrong:
            yield checked.error("MP706", f"mlp.layer_widths: layer {wrong[0]} is not a D layer", key, f"remove {wrong[0]}")
        if both := sorted(seen & set(own.layers)):
            yield checked.error("MP715", f"layer {both[0]} is twice in mlp.layer_widths", key, f"remove {both[0]} from one of them")
        seen |= set(own.layers)


DENSE = Family(
    letter="D",
    title="dense MLP",
    section="mlp",
    tensors=dense_tensors,
    program=dense_program,
    work=dense_work,
    selective=dense_selective,
    variant=Mlp.own_width,
    rules=_rules,
    sharded=_sharded,
    last_own="norm.weight",
)
