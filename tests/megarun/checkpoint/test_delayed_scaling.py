"""Delayed scaling begins a new history where a checkpoint has none of its length; one note says so."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaplan.errors import Location, Severity
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec
from megarun.checkpoint import resume
from megarun.parallel.groups.delayed import DelayedNumbers, is_scaling

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize(("saved", "said"), [(None, "= 0, and 1 blocks more"), (3, "= 3, and 1 blocks more"), (16, None)])
def test_a_history_of_another_length_is_noted_once(
    saved: int | None, said: str | None, spec_with: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = {"name": "fp8_delayed", "amax_history": 16}
    spec = Spec.model_validate(spec_with({"model.pattern": "AD", "model.num_layers": 2, "precision.recipe": recipe}))
    inventory, notes = build_inventory(spec), list[tuple[str, str]]()
    names = {} if saved is None else {f"layers.{index}.scaling_history": SimpleNamespace(size=(9, saved)) for index in range(2)}
    reader = SimpleNamespace(read_metadata=lambda: SimpleNamespace(state_dict_metadata=names))
    monkeypatch.setattr(resume, "CheckpointReader", lambda *_: reader)
    monkeypatch.setattr(resume.dist, "get_rank", lambda: 0)

    def note(code: str, detail: str, _place: Location, severity: Severity) -> None:
        assert severity is Severity.NOTE
        notes.append((code, detail))

    monkeypatch.setattr(resume, "_report", note)
    resume._note_new_scaling(SimpleNamespace(path=tmp_path, manifest=None), spec, inventory)  # type: ignore[arg-type]
    assert notes == ([] if said is None else [("MP679", f"precision.recipe.amax_history = 16, the checkpoint's of layers.0 {said}")])


def test_the_state_of_a_block_is_its_factors_and_its_history() -> None:
    recipe = SimpleNamespace(amax_history=4)
    numbers = DelayedNumbers(recipe)  # type: ignore[arg-type]
    numbers.add("layers.0", {"up_proj.weight": "e5m2", "down_proj.weight": "e4m3"})
    numbers.add("head", {"weight": "e5m2"})
    now, history = numbers.create(torch.device("cpu"))
    assert now[2].tolist() == [448, 448, 57344, 448, 448, 448, 448, 448, 57344]
    state = dict(numbers.state())
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "layers.0.scaling_factors": (6,),
        "layers.0.scaling_history": (6, 4),
        "head.scaling_factors": (3,),
        "head.scaling_history": (3, 4),
    }
    assert all(map(is_scaling, state))
    numbers.of["head.weight"]()[1].fill_(5.0)
    assert now[1].tolist() == [0] * 6 + [5] * 3
    numbers.drop()
    assert not now[1].any()
    assert not history.any()
