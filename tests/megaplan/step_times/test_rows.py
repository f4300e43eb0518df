"""A published row is timed by its spec, and the page has the constants' intervals."""

import json
import re
from itertools import count
from pathlib import Path

import numpy
import pytest
from step_times import hosts, replay, rows, specs
from step_times.table import Table

from megaplan.cost.step.constants import intervals, values
from megaplan.cost.step.from_spec import unpriced
from megaplan.cost.step.predict import predict_step
from megaplan.layout.step_time import PlannedTime, planned_time
from megaplan.spec.load import spec_from_document

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "accuracy-time.md"
IDS = count()
LLAMA = {
    "L": 32,
    "h": 4096,
    "a": 32,
    "kv": 8,
    "hd": 128,
    "ffn": 14336,
    "V": 128256,
    "gated": 1,
    "tied": 0,
    "nA": 32,
    "nD": 32,
    "nE": 0,
    "nM": 0,
}
MOE = LLAMA | {"L": 16, "h": 2048, "nA": 16, "nD": 0, "nE": 16, "E": 64, "top": 8, "mf": 1024, "shared": 0, "V": 50304, "a": 16, "kv": 16}
LATENT = MOE | {"mla": 1, "q_lora": 0, "kv_lora": 512, "rope": 64, "nope": 128, "vd": 128, "nD": 1, "nE": 15, "ffn": 8192}
HYBRID = MOE | {"nA": 2, "nE": 7, "nM": 7, "mh": 64, "mp": 64, "ms": 128, "mg": 8}


def row(arch=LLAMA, **given):
    """A row on eight H100; every other key as the tables have it."""
    plain = {
        **{"id": f"row{next(IDS)}", "source": "somewhere@abc:table", "framework": "bridge", "release": "26.04", "model": "m", "arch": arch},
        **{
            "device": "H100",
            "precision": "bf16",
            "task": "pretrain",
            "gpus": 8,
            "seq": 4096,
            "gbs": 64,
            "mbs": 1,
            "tp": 1,
            "pp": 1,
            "cp": 1,
        },
        **{
            "cp": 1,
            "vp": 1,
            "ep": 1,
            "etp": 1,
            "dp": 8,
            "nmb": 8,
            "recompute": {},
            "fsdp": None,
            "zero": 1,
            "tp_overlap": 0,
            "dispatcher": None,
        },
        **{
            "a2a_overlap": 0,
            "cuda_graph": [],
            "compiled": 1,
            "fp8_gather": 0,
            "tokendrop": 0,
            "step_s": 1.0,
            "family": "dense",
            "anomaly": None,
        },
    }
    return plain | given


CASES = {
    "dense": row(),
    "tensor": row(tp=4, dp=2),
    "pipeline": row(pp=4, vp=2, dp=2, nmb=16),
    "ends count as layers": row(LLAMA | {"L": 30, "nA": 30, "nD": 30}, pp=4, dp=2),
    "context": row(cp=2, dp=4, seq=32768),
    "fp8": row(precision="fp8", device="GB200"),
    "sharded": row(framework="torchtitan", release=None, fsdp={"kind": "fsdp2", "regather": True, "red": 4}),
    "cluster's adapters": row(framework="llm-foundry", release=None, device="A100_80GB", gpus=16, dp=16),
    "experts": row(MOE, ep=8, dispatcher="alltoall"),
    "latent attention": row(LATENT, ep=8, dispatcher="deepep"),
    "hybrid": row(HYBRID, ep=8, dispatcher="hybridep"),
    "recompute": row(recompute={"full": 1.0}),
    "modules": row(LATENT, ep=8, dispatcher="hybridep", recompute={"mla_up_proj": 1, "moe_act": 1, "core_attn": 1}),
    "sinks with windows": row(MOE | {"win": 128, "winfrac": 0.5}, ep=8, dispatcher="alltoall"),
    "experts on a latent": row(HYBRID | {"latent": 512}, ep=8, dispatcher="hybridep", cuda_graph=["attn", "mamba"]),
    "prediction depths": row(
        LATENT | {"mtp": 1}, pp=2, ep=4, dp=4, dispatcher="deepep", precision="mxfp8", device="GB200", cuda_graph=["full"], fp8_attention=1
    ),
    "a short last slot": row(LATENT | {"L": 61, "nA": 61, "nE": 60}, pp=2, vp=4, dp=4, ep=4, nmb=16, dispatcher="alltoall"),
    "a last slot without layers": row(LATENT | {"L": 61, "nA": 61, "nE": 60}, pp=8, vp=4, dp=1, nmb=64, dispatcher="alltoall"),
    "ends alone": row(LLAMA | {"L": 30, "nA": 30, "nD": 30}, pp=4, vp=8, dp=2, nmb=32),
    "stages of a hybrid": row(HYBRID | {"L": 16, "nE": 6, "nM": 8}, pp=2, dp=4, ep=4, dispatcher="hybridep"),
    "adapters": row(task="lora", tp=2, pp=2, vp=4, dp=2, precision="fp8"),
    "adapters on every linear": row(task="lora", framework="automodel", release=None, fsdp={"kind": "fsdp2", "regather": True, "red": 4}),
    "rows filled up": row(HYBRID, model="nemotron3-super", precision="mxfp8", device="GB200", ep=8, dispatcher="hybridep"),
    "dropped probabilities": row(framework="nemo", release="25.02", model="gpt3-175b", recompute={"full": 1.0}),
    "Megatron-FSDP": row(fsdp={"kind": "mfsdp", "regather": True, "red": 2}),
}
OTHER_HOSTS = {"sharded", "cluster's adapters", "adapters", "adapters on every linear", "rows filled up"}
"""Rows of frameworks whose launch specs do not say, or of launches that they do not."""


@pytest.mark.parametrize("name", sorted(set(CASES) - OTHER_HOSTS))
def test_a_spec_says_what_ran_the_row(name):
    """The host, the recipe and the policies of the row's spec give its software and its recomputation."""
    assert rows.launch_is_said(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_timed_by_its_spec(name):
    """All of its layers are on its stages, and it has a time."""
    work = rows.step_of_row(CASES[name])
    held = sum(stage.count * sum(stage.blocks.values()) for stage in work.stages)
    assert held == work.spec.model.num_layers
    assert predict_step(work).seconds > 0


def test_the_table_of_the_fit_has_the_times_of_the_model():
    """Every term of a step is among the columns that the constants are fitted by."""
    works, known = [rows.step_of_row(case) for case in CASES.values()], values()
    seconds = Table(works, tuple(known)).seconds(numpy.log([*known.values()]))
    assert list(seconds) == pytest.approx([predict_step(work).seconds for work in works])


def test_layers_that_do_not_divide_are_cut_all_the_same():
    work = rows.step_of_row(row(LLAMA | {"L": 33, "nA": 33, "nD": 33}, pp=4, dp=2))
    assert sorted((stage.blocks["A"], stage.count) for stage in work.stages) == [(8, 1), (8, 2), (9, 1)]
    with pytest.raises(ValueError, match="do not divide into 2 equal slots"):
        rows.step_of_row(row(HYBRID, pp=2, dp=4))


def test_one_microbatch_on_two_stages_is_timed():
    """Megatron-Core runs fewer microbatches than stages: the second stage waits for the first, so that one on a stage is faster."""
    few = row(pp=2, dp=4, nmb=1)
    assert spec_from_document(specs.document(few)).schedule.num_microbatches == 1
    two = predict_step(rows.step_of_row(row(pp=2, dp=4, nmb=2))).seconds
    assert 0.5 * two < predict_step(rows.step_of_row(few)).seconds < two


def test_fine_tuning_rows_are_packed_where_the_framework_packs():
    assert rows.step_of_row(row(task="sft")).batch.document == rows.SQUAD_TOKENS
    assert rows.step_of_row(row(task="lora", framework="automodel", release=None)).batch.document == 0
    assert rows.step_of_row(row()).batch.document == 0


@pytest.mark.parametrize(
    ("pp", "vp", "held"),
    [(16, 1, (4, 4, 1)), (8, 1, (8, 8, 5)), (8, 2, (8, 8, 5)), (4, 4, (16, 16, 13)), (2, 8, (32, 29)), (2, 4, (32, 29)), (8, 4, (7, 8, 6))],
)
def test_61_layers_are_cut_as_the_published_layouts_of_deepseek_v3(pp, vp, held):
    """Et*4|(t*4|)*14tmL, and Et|(tt|)*30mL of 32 slots."""
    case = row(LATENT | {"L": 61, "nA": 61, "nD": 3, "nE": 58, "mtp": 1}, pp=pp, vp=vp, dp=1, gpus=pp)
    assert {stage.blocks["A"] for stage in rows.step_of_row(case).stages} == set(held)


def test_a_replayed_row_has_its_error_and_terms():
    found = replay.replayed(row(step_s=2.0))
    assert found["error"] == found["predicted_s"] / 2.0 - 1
    assert {"gemm", "attention", "memory", "optimizer"} <= set(found["terms"])


def test_a_row_that_cannot_be_timed_says_why():
    assert "there is no 'nobody'" in replay.replayed(row(framework="nobody"))["reason"]
    assert replay.replayed(row(gpus=0, mbs=-1))["reason"] == "too small: gpus = 0, mbs = -1"
    assert replay.replayed(row(seq="long"))["reason"].startswith("TypeError")


def test_what_a_row_does_not_state_is_usual(tmp_path, monkeypatch, capsys):
    """The times equal those of a row that states the same values; the assumption is reported once."""
    bare = {key: value for key, value in row().items() if key not in replay.DEFAULTS}
    for name, one in (("bare", bare), ("whole", replay.DEFAULTS | bare)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([one, one]))
        monkeypatch.setattr("sys.argv", ["replay.py", str(path), "--json", str(tmp_path / f"{name}.out")])
        replay.main()
    assert (tmp_path / "bare.out").read_text() == (tmp_path / "whole.out").read_text()
    assert "predicted_s" in (tmp_path / "bare.out").read_text()
    assert capsys.readouterr().out.count("taken as usual") == 1


def test_a_spec_has_the_time_of_its_host_and_an_interval_of_its_class():
    """Host megatron on a device with measured rows, on one without, and host megarun."""
    spec = specs.spec_of(row(release="26.08"))
    known = planned_time(spec, ((0, spec.model.num_layers),))
    assert isinstance(known, PlannedTime)
    assert (known.calibration, known.basis) == ("dense", "fitted")
    low, high = intervals()["dense"]
    assert (known.low, known.high) == (known.seconds * low, known.seconds * high)
    other = specs.spec_of(row(device="H200"))
    unknown = planned_time(other, ((0, other.model.num_layers),))
    assert isinstance(unknown, PlannedTime)
    assert (unknown.calibration, unknown.basis) == ("uncalibrated", "modelled")
    assert unknown.high / unknown.low > known.high / known.low
    given = other.model_copy(update={"device": other.device.model_copy(update={"reached": {"bf16": 0.5}})})
    slower = planned_time(given, ((0, other.model.num_layers),))
    assert isinstance(slower, PlannedTime)
    assert slower.calibration == "dense"
    assert slower.terms["gemm"] > unknown.terms["gemm"]
    own = spec.model_copy(update={"host": type(spec.host)(name="megarun")})
    replayed = planned_time(own, ((0, spec.model.num_layers),))
    assert isinstance(replayed, PlannedTime)
    assert (replayed.calibration, replayed.basis) == ("uncalibrated", "modelled")
    assert replayed.high / replayed.low > unknown.high / unknown.low


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"pattern": "RD", "recurrent": {"kind": "m2rnn", "num_heads": 4, "key_dim": 8, "value_dim": 8}}, "matrix recurrences (R)"),
        ({"pattern": "MD", "mamba": {"kind": "mamba3"}}, "model.mamba.kind mamba3"),
    ],
)
def test_what_has_no_term_is_named(model, reason):
    document = specs.document(row()) | {"host": {"name": "megarun"}}
    document["model"] = {"hidden_size": 256, "vocab_size": 512, "num_layers": 2, "mlp": {"ffn_hidden_size": 512}} | model
    assert unpriced(specs.spec_from_document(document)) == reason


@pytest.mark.parametrize(
    ("framework", "pp", "nmb", "size"),
    [("torchtitan", 8, 32, (4, 8)), ("torchtitan", 8, 8, (1, 8)), ("torchtitan", 1, 32, (1, 32)), ("bridge", 8, 32, (1, 32))],
)
def test_a_pipeline_of_torchtitan_has_as_many_microbatches_as_ranks(framework, pp, nmb, size):
    found = hosts.with_microbatches(row(framework=framework, pp=pp, nmb=nmb))
    assert (found["mbs"], found["nmb"]) == size


def test_the_page_has_the_intervals_of_the_constants():
    section = PAGE.read_text(encoding="utf-8").split("## Intervals")[1].split("## ")[0]
    found = {
        name: (float(low), float(high))
        for name, low, high in re.findall(r"^\| ([\w ]+) \| \d+ \| \d* \| ([\d.]+) \| ([\d.]+) \|", section, re.M)
    }
    assert found == {name: (round(low, 3), round(high, 3)) for name, (low, high) in intervals().items()}


def test_the_page_lists_every_row_once():
    listed = re.findall(r"^\| (\w+) \|", PAGE.read_text(encoding="utf-8").split("## Every row")[1], re.M)
    assert listed[0] == "row"
    assert len(listed) - 1 == len(set(listed)) - 1 == 655
