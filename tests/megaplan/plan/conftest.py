"""Plans for the tests of this folder."""

from pathlib import Path

import pytest

from megaplan.plan.document import PlanDocument
from megaplan.plan.make import make_plan
from megaplan.spec.load import load_spec

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def plans_dir() -> Path:
    return ROOT / "plans"


@pytest.fixture(scope="session")
def planned(plans_dir):
    """`planned("tiny-hybrid-pp2", "mesh.tp=2")`: the plan of a bundled spec with overrides."""
    made: dict[tuple[str, ...], PlanDocument] = {}

    def plan(name: str, *overrides: str) -> PlanDocument:
        key = (name, *overrides)
        if key not in made:
            made[key] = make_plan(load_spec(str(plans_dir / f"{name}.yaml"), overrides).spec, overrides=overrides)
        return made[key]

    return plan
