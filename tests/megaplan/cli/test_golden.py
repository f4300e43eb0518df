"""Output of each command, at a width of 80. `MEGAPLAN_UPDATE_GOLDEN=1 pytest tests/megaplan/cli` writes the texts again."""

from pathlib import Path

import pytest

from megaplan.budget.axes import AXES
from megaplan.cli.key_topics import spec_keys
from megaplan.cli.topics import topic_lines
from megaplan.columns import Column
from megaplan.diagnostics import codes

CASES = {
    "estimate-tiny": ("estimate", "plans/tiny-hybrid-pp2.yaml"),
    "estimate-nam56r": ("estimate", "plans/nam56r-8xh200.yaml"),
    "estimate-does-not-fit": ("estimate", "plans/llama-3.1-8b.yaml", "--set", "batch.micro_batch_size=16"),
    "estimate-rank": ("estimate", "plans/nam56r-8xh200.json", "--rank", "5"),
    "estimate-compared": (
        *("estimate", "plans/llama-3.1-8b.yaml", "--set", "host.kernels=triton", "--set", "batch.micro_batch_size=2"),
        *("--set", "mesh.pp=1", "--set", "mesh.dp_shard=8", "--compare", "host.kernels=reference"),
    ),
    "estimate-skewed": ("estimate", "plans/nam56r-8xh200.yaml", "--set", "mesh.ep=4", "--set", "batch.micro_batch_size=6"),
    "estimate-padded": ("estimate", "plans/nam56r-8xh200.yaml", "--set", "mesh.dp_shard=2048"),
    "estimate-torchtitan": (
        *("estimate", "plans/llama-3.1-8b.yaml", "--set", "host={name: torchtitan, compile_model: true}"),
        *("--set", "recompute.default=selective", "--set", "device.name=h100-sxm"),
    ),
    "explain-host": ("explain", "torchtitan"),
    "split": ("split", "plans/nam56r-8xh200.yaml", "-o", "new.json"),
    "split-padded": ("split", "plans/llama-3.1-8b.yaml", "--set", "mesh.dp_shard=1021"),
    "split-manual": (
        "split",
        "plans/tiny-hybrid-pp2.yaml",
        *("--set", "split.spans=[[0,4],[4,9]]", "--set", "split.reason=R begins a stage", "--mode", "manual"),
    ),
    "split-in-flight": ("split", "plans/nam56r-8xh200.yaml", "--mode", "equal", "--set", "recompute.blocks={}"),
    "split-v": ("split", "plans/tiny-hybrid-pp2.yaml", "--set", "mesh.vpp=2", "--set", "schedule.kind=zbv"),
    "split-bottleneck": ("split", "plans/nam56r-8xh200.yaml", "--objective", "bottleneck"),
    "split-memory": ("split", "plans/nam56r-8xh200.yaml", "--set", "batch.micro_batch_size=12"),
    "split-does-not-fit": ("split", "plans/nam56r-8xh200.yaml", "--set", "schedule.kind=gpipe", "--set", "mesh.vpp=1"),
    "split-infeasible": ("split", "plans/tiny-hybrid-pp2.yaml", "--set", "split.forbid=[1,2,3,4,5,6,7,8]"),
    "search": (
        "search",
        "plans/tiny-hybrid-pp2.yaml",
        "--devices",
        "4",
        "--vary",
        "schedule",
        "--top",
        "3",
        "--processes",
        "1",
        "--exhaust",
    ),
    "run": ("run", "plans/llama-3.1-8b.yaml", "--tokens", "2T", "--mtbf", "30000h", "--price", "2.5", "--set", "mesh.dp_shard=1024"),
    "show": ("show", "plans/nam56r-8xh200.json"),
    "diff": ("diff", "plans/nam56r-8xh200-equal.json", "plans/nam56r-8xh200.json"),
    "diff-markdown": ("diff", "plans/nam56r-8xh200-equal.json", "plans/nam56r-8xh200.json", "--format", "markdown"),
    "diff-same": ("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.json"),
    "check": ("check", "plans/tiny-hybrid.json"),
    "devices": ("devices",),
    "devices-one": ("devices", "h100-sxm"),
    "explain-code": ("explain", "MP203"),
    "explain-column": ("explain", "activations"),
    "explain-axis": ("explain", "ep"),
    "explain-unknown": ("explain", "dispatcher"),
    "new-unknown": ("new", "nam56"),
    "usage": ("estimate", "--bogus"),
    "spec-as-plan": ("show", "plans/tiny-hybrid.yaml"),
    "plan-as-spec": ("split", "plans/tiny-hybrid.json"),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name, megaplan, golden):
    ran = megaplan(*CASES[name])
    golden(name, ran)


def test_the_readme_shows_what_is_printed(megaplan):
    """README.md shows an estimate of a committed spec on its first screen."""
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    command, shown = readme.split("```console\n", 1)[1].split("```", 1)[0].split("\n", 1)
    assert command == "$ megaplan " + " ".join(CASES["estimate-nam56r"])
    assert shown.strip() == megaplan(*CASES["estimate-nam56r"]).out.strip()


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("diff-markdown", "plan-as-spec", "new-unknown"))])
def test_the_answer_fits_80_columns(name, megaplan):
    ran = megaplan(*CASES[name])
    too_long = [
        line for line in ran.out.splitlines() if len(line) > 80 and not line.startswith("megaplan estimate ")
    ]  # commands are pasted whole
    assert too_long == []


def test_explain_shows_the_tensors_behind_the_numbers(megaplan, golden):
    golden("estimate-explain", megaplan("estimate", "plans/tiny-hybrid-pp2.yaml", "--rank", "0", "--explain"))


@pytest.mark.requirement("R-20")
@pytest.mark.parametrize("axis", ["tp", "sp", "cp", "ep", "recompute", "checkpoint"])
def test_every_axis_says_what_it_cannot_fix(megaplan, axis):
    ran = megaplan("explain", axis)
    assert ran.status == 0
    assert "cannot fix:" in ran.out


def test_everything_that_has_a_name_can_be_explained(megaplan):
    for topic in (*codes(), *Column, *(column.key for column in Column), *AXES):
        ran = megaplan("explain", topic)
        assert ran.status == 0, topic
        assert len(ran.out.splitlines()) > 3, topic


def test_every_key_of_a_spec_can_be_explained():
    for key in spec_keys():
        lines = [text for text, _ in topic_lines(key)]
        assert len(lines) > 1, key
    told = "\n".join(text for text, _ in topic_lines("sharding.prefetch"))
    assert "values: 1 to 64, or null" in told
    assert "default: null" in told
    assert "keys: mode, prefetch" in "\n".join(text for text, _ in topic_lines("sharding"))
    assert [text for text, _ in topic_lines("prefetch")] == [text for text, _ in topic_lines("sharding.prefetch")]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("ZeRO-3", "dp_shard: "),
        ("fsdp2", "dp_shard: "),
        ("activation checkpointing", "recompute: "),
        ("Tensor Parallelism", "tp: "),
        ("CUDA graphs", "host.cuda_graphs"),
        ("ddp", "sharding.mode"),
        ("OOM", "MP501"),
        ("reserved memory", "reserved memory"),
    ],
)
def test_names_of_other_frameworks_have_their_topic(name, first):
    text, _ = next(iter(topic_lines(name)))
    assert text.startswith(first)


def test_a_name_that_begins_as_another_is_not_that_one(megaplan):
    assert megaplan("explain", "zero bubble").status == 2


def test_a_part_of_a_name_leads_to_the_names_that_have_it(megaplan):
    ran = megaplan("explain", "dispatcher")
    assert ran.status == 2
    assert "hint: megaplan explain host.moe_dispatcher\n" in ran.err
