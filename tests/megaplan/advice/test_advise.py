"""Advised changes: the smallest, on the same number of GPUs, fastest first, and found with a fixed amount of work."""

import re
import shlex

import pytest

import megaplan
from megaplan.advice.advise import MOST, WORK, Adviser
from megaplan.advice.pricing import Price, Pricer, Work
from megaplan.budget.fit import DOES_NOT_FIT
from megaplan.errors import Diagnostic
from megaplan.partition import fitting
from megaplan.partition.memory import Memory
from megaplan.spec.models import Spec
from megaplan.units import format_bytes


def advice_of(*changes: str, source: str = "plans/llama-3.1-8b.yaml") -> Diagnostic:
    (found,) = [item for item in megaplan.estimate(source, *changes).diagnostics if item.code == DOES_NOT_FIT]
    return found


def keys_of(hint: str) -> set[str]:
    return {word.partition("=")[0] for word in shlex.split(hint.partition("#")[0]) if word != "--set"}


def test_the_fastest_of_the_smallest_changes_comes_first() -> None:
    hints = advice_of("batch.micro_batch_size=16").hints[:-1]
    assert 1 < len(hints) <= MOST
    lost = [int(hint.partition("modelled step ")[2].partition(" ")[0]) for hint in hints]
    assert lost == sorted(lost)
    assert all("leaves" in hint and "GPUs" not in hint for hint in hints)
    assert {"batch.micro_batch_size", "schedule.num_microbatches"} in [keys_of(hint) for hint in hints]


def test_one_message_names_rank_slot_columns_and_batch() -> None:
    found = advice_of("batch.micro_batch_size=2", "mesh.dp_shard=1", "model.num_layers=256")
    (rank,) = re.match(r"rank (\d): peak ", found.detail).groups()
    assert f"pp rank {rank}, slot {rank} with layers [" in found.detail
    assert "; no split needs less" in found.detail
    assert "\ncut " in found.detail
    assert "with these cuts even batch.micro_batch_size = 1 does not fit" in found.detail


def test_more_gpus_only_where_no_change_fits_on_as_many() -> None:
    (first, *_) = advice_of("mesh.pp=1", "mesh.dp_shard=2", "batch.micro_batch_size=4").hints
    assert "GPUs instead of" not in first
    (first, *_) = advice_of("mesh.pp=1", "mesh.dp_shard=1", "model.num_layers=512").hints
    assert " GPUs instead of 1" in first
    assert "leaves" in first


def test_experts_are_spread_over_the_gpus_that_are_added() -> None:
    """A model of 256 experts on one GPU; whole banks on each rank would not fit on 1,024."""
    changes = ("mesh={}", "schedule={kind: 1f1b}", "batch.micro_batch_size=1", "model.moe.num_experts=256", "sharding={}", "recompute={}")
    (first, *_) = advice_of(*changes, source="plans/mixtral-8x7b.yaml").hints
    assert "leaves" in first
    assert "mesh.ep" in keys_of(first)


def test_a_plan_keeps_its_slots() -> None:
    found = advice_of("batch.micro_batch_size=16", source="plans/llama-3.1-8b.json")
    assert len(found.hints) > 1
    assert all(not keys_of(hint) & {"mesh.pp", "mesh.vpp"} for hint in found.hints[:-1])


def test_split_promises_what_estimate_says() -> None:
    with pytest.raises(megaplan.MegaplanError) as caught:
        megaplan.split("plans/llama-3.1-8b.yaml", "batch.micro_batch_size=16")
    (found,) = caught.value.diagnostics
    assert found.hints[:-1] == advice_of("batch.micro_batch_size=16").hints[:-1]


def test_a_split_by_step_time_is_advised_with_its_own_cuts() -> None:
    (first, *_) = advice_of("batch.micro_batch_size=16", "split.objective=step_time").hints
    changes = [word for word in shlex.split(first.partition("#")[0]) if word != "--set"]
    after = megaplan.estimate("plans/llama-3.1-8b.yaml", "batch.micro_batch_size=16", "split.objective=step_time", *changes)
    assert f"peak {format_bytes(after.peak_bytes)}, " in first


@pytest.mark.parametrize(
    "changes",
    [
        ("mesh.dp_shard=4096", "batch.micro_batch_size=16"),
        pytest.param(("model.num_layers=1000", "mesh.pp=8", "mesh.dp_shard=64"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_the_work_of_what_does_not_fit_is_limited(monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...]) -> None:
    """1,000 layers and 4,096 shards: counted, so that the answer does not depend on the machine."""
    made: list[Memory] = []
    original = Memory.__init__

    def noted(self: Memory, *args: object, **named: object) -> None:
        original(self, *args, **named)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Memory, "__init__", noted)
    job = megaplan.load("plans/nam56r-8xh200.yaml", *changes)
    found = megaplan.estimate(job)
    one = max(made[0].work // max(1, made[0].num_budgets), 1)
    assert made[0].work <= 4 * fitting.MAX_STAGE_WORK + 40 * one
    before, price = [], Pricer.quick

    def counted(self: Pricer, spec: Spec) -> Price | None:
        before.append(self.work.left)
        return price(self, spec)

    monkeypatch.setattr(Pricer, "quick", counted)
    Adviser(job.spec, Price(job.spans, found.peak_bytes, -found.headroom_bytes), Pricer(work=Work(WORK))).find()
    assert 0 < len(before) <= 200
    assert min(before) > 0, "nothing is priced once the work is spent"
