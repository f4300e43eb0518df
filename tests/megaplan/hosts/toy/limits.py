"""Rules of the toy host."""

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.spec.context import Checked


def toy_rules(checked: Checked) -> Iterator[Diagnostic]:
    """MP902."""
    if (tp := checked.spec.mesh.tp) > 1:
        yield checked.error("MP902", f"mesh.tp = {tp}, and the toy host has whole tensors", "mesh.tp", "tp: 1")
