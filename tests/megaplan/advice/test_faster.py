"""Changes that make a step faster: promised numbers equal an estimate of the changed job."""

import pytest

import megaplan
from megaplan.advice.faster import FASTER_WORK, LEAST, MOST, faster
from megaplan.advice.pricing import Pricer, Work

JOBS = {
    "pipeline": ("plans/llama-3.1-8b.yaml", "mesh.pp=2", "mesh.dp_shard=4"),
    "recompute": ("plans/tiny-hybrid-pp2.yaml", "recompute.blocks={A: full, E: selective}"),
    "torchtitan": ("plans/llama-3.1-8b.yaml", "host={name: torchtitan}", "mesh.pp=2", "mesh.dp_shard=4"),
    "megatron": ("plans/mixtral-8x7b.yaml", "host={name: megatron}", "host.recompute_num_layers=1", "mesh.vocab_parallel=false"),
}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_promised_is_estimated(name: str) -> None:
    source, *changes = JOBS[name]
    before = megaplan.estimate(source, *changes)
    assert before.step_seconds is not None
    assert 0 < len(before.faster) <= MOST
    steps = [change.step_ns for change in before.faster]
    assert steps == sorted(steps)
    for change in before.faster[:2]:
        after = megaplan.estimate(source, *changes, *change.overrides)
        assert after.step_seconds is not None
        assert round(after.step_seconds * 1e9) == change.step_ns < before.step_seconds * 1e9 * (1 - 1 / LEAST)
        assert (after.peak_bytes, tuple(after.job.spans)) == (change.price.peak_bytes, change.price.spans)
        assert after.headroom_bytes == -change.price.over_bytes >= 0
        for kept in ("global_batch_size", "global_batch_tokens"):
            assert getattr(after.job.spec, kept) == getattr(before.job.spec, kept)
        assert after.job.spec.mesh.world_size == before.job.spec.mesh.world_size


def test_nothing_is_priced_once_the_work_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    job = megaplan.load("plans/nam56r-8xh200.yaml")
    before, price = [], Pricer.price
    monkeypatch.setattr(Pricer, "price", lambda self, spec: before.append(self.work.left) or price(self, spec))
    found = faster(job.spec, 1 << 62, Pricer(work=Work(FASTER_WORK)))
    assert before
    assert min(before) > 0
    assert [change.step_ns for change in found] == sorted(change.step_ns for change in found)


def test_a_job_that_does_not_fit_is_advised_to_fit_alone() -> None:
    found = megaplan.estimate("plans/llama-3.1-8b.yaml", "batch.micro_batch_size=16")
    assert not found.fits
    assert found.faster == ()


def test_a_plan_keeps_its_slots() -> None:
    found = megaplan.estimate("plans/tiny-hybrid-pp2.json")
    spans = tuple(found.job.spans)
    assert all(change.price.spans == spans for change in found.faster)
    assert all(not text.startswith(("mesh.pp=", "mesh.vpp=")) for change in found.faster for text in change.overrides)
