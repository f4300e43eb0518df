"""Copies of state on several ranks are compared bit by bit."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaplan.errors import MegaplanError
from megaplan.spec.models import Mesh
from megarun.checkpoint.pieces import Pieces
from megarun.training import replicas
from megarun.training.replicas import ReplicaChecks, differences, sum_of_bits, sums_of

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4)])
def test_each_bit_changes_the_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 3, dtype=torch.float64).to(dtype)
    before = sum_of_bits(tensor)
    assert sum_of_bits(tensor.clone()) == before
    for number in range(8 * tensor.element_size() if tensor.numel() else 0):
        other = tensor.clone()
        other.view(-1).view(torch.uint8)[number // 8] ^= 1 << number % 8
        assert sum_of_bits(other) != before, number


def test_a_column_of_a_larger_tensor_counts_alone() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert sum_of_bits(whole[:, 1]) == sum_of_bits(whole[:, 1].clone())


def test_the_minority_is_named_and_without_one_all_are() -> None:
    same = [{"p": ("norm.weight", 7), "q": ("head.weight", 1)}, {"p": ("norm.weight", 7)}, {"p": ("norm.weight", 7)}]
    assert differences(same) == []
    assert differences([*same, {"p": ("norm.weight", 9)}]) == [("norm.weight", [3], "differs from 3 others")]
    assert differences([same[1], {"p": ("norm.weight", 9)}]) == [("norm.weight", [0, 1], "differ from each other")]
    assert differences([same[1], {"p": ("norm.weight", 9)}, {}]) == [("norm.weight", [0, 1], "differ from each other")]
    assert differences([{"p": ("a", 1)}, {"q": ("a", 2)}]) == []  # other parts of one tensor


def test_parts_of_a_tensor_differ_by_their_boxes() -> None:
    state = [("w", Pieces.unsharded(torch.ones(2, 3))), ("w2", Pieces.unsharded(torch.ones(2, 3)))]
    found = sums_of(state)
    assert sorted(name for name, _ in found.values()) == ["w", "w2"]
    shard = Pieces(torch.ones(2, 3), (4, 3), ())
    assert not set(sums_of([("w", shard)])) & set(found)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("every", "checked"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (4, [3, 4, 6])])
def test_a_check_is_due_every_few_steps_and_before_a_save(monkeypatch: pytest.MonkeyPatch, every: int, checked: list[int]) -> None:
    dropped: list[bool] = []
    keeper: Any = SimpleNamespace(control=dist.group.WORLD, finish_save=lambda: None, forget_copies=lambda: dropped.append(True))
    monkeypatch.setattr(replicas, "model_state", lambda *_: [])
    monkeypatch.setattr(replicas, "optimizer_state", lambda *_: [])
    monkeypatch.setattr(replicas, "differences", lambda _: [("norm.weight", [0], "differs from 2 others")])
    job: Any = SimpleNamespace(inventory=None, spec=SimpleNamespace(mesh=Mesh()))
    checks = ReplicaChecks(every, keeper, None, job)  # type: ignore[arg-type]
    for step in range(1, 7):
        with pytest.raises(MegaplanError) if step in checked else nullcontext() as error:
            checks.after(step, saves=step % 3 == 0)
        if error is not None:
            assert error.value.diagnostics[0].code == "MP676"
            assert f"after step {step}:\nnorm.weight: rank 0" in error.value.diagnostics[0].detail
    assert len(dropped) == (len(checked) if every > 1 else 0)  # copies of a step that was checked stay
