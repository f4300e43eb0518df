"""A spec one change away from a legal one is planned or answered with diagnostics, never with a crash or another exit."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from random_plans.near import draw_near_legal

from megaplan.cli.main import run
from megaplan.errors import MegaplanError
from megaplan.plan.make import make_plan
from megaplan.spec.load import spec_from_document

NUM_DRAWS = 800
DEFECTS = ("MP499", "MP900")
"""Text with which an uncaught exception is reported."""


def test_near_legal_specs_are_planned_or_refused_with_diagnostics() -> None:
    wrong, codes, planned = [], Counter[str](), 0
    for seed in range(NUM_DRAWS):
        document = draw_near_legal(seed)
        try:
            make_plan(spec_from_document(document))
            planned += 1
        except MegaplanError as error:
            codes.update({item.code for item in error.diagnostics})
            if not error.diagnostics:
                wrong.append(f"seed {seed}: no diagnostics")
        except Exception as error:
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert 0.1 * NUM_DRAWS < planned < 0.7 * NUM_DRAWS
    assert len(codes) > 40, codes


@pytest.mark.parametrize("seed", range(20))
def test_the_command_exits_as_documented(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(draw_near_legal(seed)))
    status = run(["estimate", str(path), "--json"])
    assert status in (0, 1, 2)
    document = json.loads(capsys.readouterr().out)
    if status == 2:
        assert document["format"] == "megaplan.error/1"
        assert not {item["code"] for item in document["diagnostics"]} & {*DEFECTS}
