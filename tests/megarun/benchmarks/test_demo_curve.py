"""The demo's picture matches the files of its two runs."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

SVG = "{http://www.w3.org/2000/svg}"
SCRIPT = Path(__file__).parents[3] / "scripts" / "demo_curve.py"


@pytest.fixture(scope="module")
def curve() -> ModuleType:
    found = importlib.util.spec_from_file_location("demo_curve", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["demo_curve"] = module  # where dataclasses look for a class's module
    found.loader.exec_module(module)
    return module


def loss(step: int) -> float:
    return 8.0 / step


def write(run: Path, *steps: int, tail: str = "") -> Path:
    run.mkdir()
    lines = [{"step": step, "loss": loss(step), "step_seconds": 0.1} for step in steps]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"decision": "skip", "step": 1}, *lines]) + tail)
    return run


def test_two_starts_are_distinguished(curve: ModuleType, tmp_path: Path) -> None:
    """Steps 1 to 7, killed, resumed from step 5; the last line of a step that was made twice counts."""
    broken = curve.read_broken(write(tmp_path / "run", *range(1, 8), *range(6, 11)))
    assert (broken.killed_after, broken.resumed_after) == (7, 5)
    assert broken.losses == {step: loss(step) for step in range(1, 11)}


def test_a_line_that_the_kill_has_cut_off_is_left_out(curve: ModuleType, tmp_path: Path) -> None:
    assert curve.step_losses(write(tmp_path / "run", 1, 2, tail='{"step": 3, "lo')) == [(1, 8.0), (2, 4.0)]


def test_a_run_that_was_never_killed_is_refused(curve: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step was made twice"):
        curve.read_broken(write(tmp_path / "run", 1, 2, 3))


def test_the_picture_names_its_axes_the_kill_and_the_difference(curve: ModuleType) -> None:
    whole = {step: loss(step) for step in range(1, 11)}
    after = {step: loss(step) for step in range(6, 11)} | {10: loss(10) * (1 + 2.0e-6)}
    picture = ElementTree.fromstring(curve.draw(whole, curve.Broken(dict(list(whole.items())[:7]), after), "pp 2 & dp 2", "tp 2"))
    words = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"optimizer step", "loss, nats per token", "kill -9 after step 7", "resumed from step 5", "pp 2 & dp 2", "tp 2"} <= set(words)
    assert "largest relative difference from the uninterrupted run: 2.0e-06" in words
    curves = {element.get("class"): element.get("d").count("L") + 1 for element in picture.iter(f"{SVG}path") if "L" in element.get("d")}
    assert curves == {"whole": 10, "before": 5, "lost": 3, "after": 6}
    kill = next(element for element in picture.iter(f"{SVG}path") if element.get("class") == "kill")
    at = curve.LEFT + 7 / 10 * (curve.WIDTH - curve.LEFT - curve.RIGHT)
    assert kill.get("d").startswith(f"M{at:.1f},")
