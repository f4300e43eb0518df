"""A fact that several commands state, or several functions compute, is the same for drawn documents of every host."""

import json
import shlex
from collections.abc import Iterator
from copy import deepcopy
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from random_plans.choices import SMALL, Draw
from random_plans.draw import draw
from random_plans.maxtext import maxtext_document
from random_plans.torchtitan import torchtitan_document

import megaplan
from megaplan.layout.calibrate import measured_step
from megaplan.layout.step_time import PlannedTime
from megaplan.plan.make import plan_text

HOSTS = ("megarun", "megatron", "torchtitan", "maxtext")
Document = dict[str, Any]


def drawn(host: str, first: int) -> Iterator[Document]:
    """Legal documents of a host."""
    for seed in count(first):
        if host == "torchtitan":
            document = torchtitan_document(Draw(f"facts/{seed}"), f"torchtitan-{seed}")
        elif host == "maxtext":
            document = maxtext_document(Draw(f"facts/{seed}"), f"maxtext-{seed}")
        else:
            document = draw(seed, size=SMALL)
        try:
            job = megaplan.load(document)
        except megaplan.MegaplanError:
            continue
        if job.spec.host.name == host:
            yield document


@pytest.mark.parametrize("host", HOSTS)
def test_a_plan_says_what_its_spec_says(host: str, tmp_path: Path) -> None:
    """Cuts, bytes, step, and the rules' warnings and notes: a plan has every default written out, and is the same job."""
    for document in islice(drawn(host, 31_000), 12):
        before, path = megaplan.estimate(document), tmp_path / "plan.json"
        path.write_text(plan_text(megaplan.split(document).plan))
        after = megaplan.estimate(path)
        assert after.job.spans == before.job.spans
        assert after.step_time == before.step_time
        assert [rank.cells for rank in after.ranks] == [rank.cells for rank in before.ranks]
        of_rules = [[(each.code, each.detail) for each in found.job.read_diagnostics] for found in (before, after)]
        assert of_rules[0] == of_rules[1], document["name"]


@pytest.mark.parametrize("change", ["device.capacity_gib=8", "mesh.fsdp=2", "mesh.tp=", "mesh.tp"])
def test_a_wrong_change_of_a_plan_is_an_error(change: str) -> None:
    """It is the error of the same change of a spec."""
    found = []
    for source in ("plans/tiny-hybrid.yaml", "plans/tiny-hybrid.json"):
        with pytest.raises(megaplan.MegaplanError) as refused:
            megaplan.estimate(source, change)
        found.append([(each.code, each.detail, each.hints) for each in refused.value.diagnostics])
    assert found[0] == found[1]


@pytest.mark.parametrize("host", HOSTS)
def test_terms_are_parts_of_the_step(host: str) -> None:
    """They sum to it, and none is negative."""
    timed = (found for document in drawn(host, 32_000) if isinstance(found := megaplan.estimate(document).step_time, PlannedTime))
    for time in islice(timed, 30):
        assert sum(time.terms.values()) == pytest.approx(time.seconds, rel=1e-9)
        assert min(time.terms.values()) >= 0, time.terms


def test_plain_torch_is_no_faster_than_one_kernel() -> None:
    """A step of a recurrence takes as long in plain torch, so stating a longer one makes no term negative."""
    document = next(each for each in drawn("megarun", 32_000) if "R" in each["model"]["pattern"] and "pools" not in each)
    time = megaplan.estimate(document, "host.kernels=reference", "device.recurrence_step_ns=10000000").step_time
    assert isinstance(time, PlannedTime)
    assert time.terms.get("plain torch", 0) >= 0


def in_pools(document: Document, found: megaplan.Estimate) -> Document:
    """The job with its second stage and the others in a pool of the same device, and the same cuts."""
    mesh, changed = found.job.spec.mesh, deepcopy(document)
    changed["pools"] = [{"count": mesh.world_size // mesh.pp, "device": document.get("device", {"name": "h200"})}]
    changed["split"] = {"mode": "manual", "reason": "as before", "spans": [list(span) for span in found.job.spans]}
    return changed


def test_a_pool_of_the_same_device_changes_nothing() -> None:
    """Terms of several types of devices are those of one type: waits for offloaded activations among them."""
    seen = 0
    for document in drawn("megarun", 33_000):
        if {"pools", "post_training"} & document.keys() or "|" in document["model"]["pattern"] or document["mesh"].get("pp", 1) < 2:
            continue
        try:
            letters = [letter for letter in sorted(set(document["model"]["pattern"].upper())) if letter.isalpha()]
            one = megaplan.estimate(document, f"host.activation_offload=[{','.join(letters)}]")
            several = megaplan.estimate(in_pools(document, one), *one.job.changes)
        except megaplan.MegaplanError:  # a schedule or a recipe without offload, or without pools
            continue
        assert several.step_time == one.step_time, document["name"]
        assert several.peak_bytes == one.peak_bytes
        seen += 1
        if seen == 8:
            return


def test_a_step_is_calibrated_by_the_timer_that_predicts_it() -> None:
    """The share of the peak is found with the times of all devices of a pipeline."""
    document = {
        **json.loads(json.dumps(megaplan.load("plans/tiny-hybrid-pp2.yaml").spec.as_document())),
        "pools": [{"count": 1, "device": {"name": "a100-80gb"}}],
        "device": {"name": "h100-sxm"},
    }
    found = megaplan.estimate(document, "model.hidden_size=2048", "batch.seq_length=8192")
    assert isinstance(found.step_time, PlannedTime)
    step = measured_step("of pools", found.job.spec, found.job.spans, found.step_time.seconds)
    assert not isinstance(step, str)
    assert step.predict(step.share) == pytest.approx(sum(step.terms(step.share).values()), rel=1e-9)


GROUPED = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 8, "head_dim": 64}
LATENT = {
    "kind": "mla",
    "num_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
MORE: dict[str, Document] = {
    "steps of an update": {"schedule": {"kind": "1f1b", "num_microbatches": 2, "steps_per_update": 2}},
    "boundaries": {"model": {"pattern": "AD|AD"}, "split": {"reason": "mine"}},
    "manual cuts": {"split": {"mode": "manual", "reason": "mine", "spans": [[0, 1], [1, 4]]}},
    "latents": {"model": {"attention": LATENT}, "mesh": {"pp": 2, "cp": 2, "context_exchange": "latents"}},
    "parts of a group": {"mesh": {"dp_shard": 4}, "sharding": {"reshard_after_forward": True, "reshard_size": 2}},
}
"""Values of a spec that another layout has otherwise, or by default."""


@pytest.mark.parametrize(("name", "host"), [*((name, "megarun") for name in MORE), ("boundaries", "megatron"), ("manual cuts", "megatron")])
def test_a_command_of_a_search_prints_its_row(name: str, host: str, tmp_path: Path) -> None:
    document: Document = {
        "format": "megaplan.spec/1",
        "name": "searched",
        "model": {"pattern": "AD", "num_layers": 4, "hidden_size": 512, "vocab_size": 4096, "attention": GROUPED},
        "mesh": {"pp": 2, "cp": 2},
        "batch": {"micro_batch_size": 1, "seq_length": 1024},
        "schedule": {"kind": "1f1b", "num_microbatches": 2},
        "optimizer": {"matrix": "adamw"},
        "host": {"name": host},
        **{key: value for key, value in MORE[name].items() if key != "model"},
    }
    document["model"] |= {"mlp": {"ffn_hidden_size": 1536}, **MORE[name].get("model", {})}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(document))
    vary = ("schedule", "batch", *(("precision",) if host == "megarun" else ()))
    found = megaplan.search(path, seconds=None, top=12, processes=1, vary=vary)
    assert found.rows
    for row in found.rows:
        words = shlex.split(found.command(row))
        again = megaplan.estimate(words[2], *words[4::2])
        assert again.step_seconds == pytest.approx(row.step_seconds, abs=1e-9), words
        assert again.peak_bytes == row.peak_bytes, words
        assert isinstance(again.step_time, PlannedTime)
        assert again.step_time.mfu == pytest.approx(row.mfu)
        assert again.step_time.terms == pytest.approx(row.terms, abs=1e-9)
        assert again.job.spec.global_batch_size == found.job.spec.global_batch_size
        assert megaplan.load(path, *row.changes).spec.mesh == row.spec.mesh


def test_a_search_has_only_dtypes_that_the_host_takes() -> None:
    """torchtitan keeps gradients and master weights in one dtype."""
    document = next(each for each in drawn("torchtitan", 34_000) if each["precision"]["master"] == "fp32")
    found = megaplan.search(document, seconds=None, top=3, processes=1, vary=("precision",))
    assert {row.exact.policy.grads for row in found.rows} == {document["precision"]["grads"]}


@pytest.mark.parametrize("kind", ["dualpipev", "zbv", "interleaved_zero_bubble", "1f1b"])
def test_a_run_takes_every_schedule_that_an_estimate_takes(kind: str) -> None:
    """The part of a step that occurs once is found with another number of microbatches, with which the schedule has an order."""
    slots = 1 if kind == "1f1b" else 2
    changes = (f"mesh={{pp: 2, vpp: {slots}}}", f"schedule={{kind: {kind}, num_microbatches: 4}}")
    found = megaplan.run("plans/tiny-hybrid-pp2.yaml", *changes, "split={mode: equal}", tokens="1B", ramp_tokens="10M")
    assert found.mean_step_seconds.value > found.step_seconds.value
