"""A plan to export."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megaplan.exporters.values import Source
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec

PLANS = Path(__file__).parents[3] / "plans"


@pytest.fixture
def source_of() -> Callable[..., Source]:
    """Llama-3.1-8B with changes of its spec, `KEY=VALUE` each."""

    def made(*changes: str) -> Source:
        spec = load_spec(str(PLANS / "llama-3.1-8b.yaml"), changes).spec
        inventory = build_inventory(spec)
        return Source(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))

    return made
