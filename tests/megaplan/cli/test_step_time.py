"""The time of a step in the commands' texts and documents."""

import json
from pathlib import Path

import pytest

from megaplan.cost.step.formulas import FORMULAS

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "step-time-model.md").read_text(encoding="utf-8")
MEGATRON = ("--set", "host.name=megatron", "--set", "device.name=h100-sxm")
MTP = "model.features={mtp: {depth: 1, ffn_hidden_size: 14336}}"
KEYS = {"step_seconds", "interval", "tokens_per_second_per_device", "mfu", "terms", "basis", "calibration", "data_traffic"}
FITTED = (*MEGATRON, "--set", "host.framework=megatron-bridge", "--set", 'host.release="26.08"', "--set", "optimizer.matrix=adamw")


def time_of(ran) -> dict:
    return json.loads(ran.out)["time"]


def test_the_page_shows_what_is_printed(megaplan):
    command, shown = PAGE.split("```console\n$ megaplan ", 1)[1].split("```", 1)[0].split("\n", 1)
    assert shown in megaplan(*command.split()).out


def test_the_page_names_every_formula():
    assert [name for name in FORMULAS if f"`{name}`" not in PAGE] == []


def test_estimate_and_split_agree(megaplan):
    estimate = time_of(megaplan("estimate", "plans/llama-3.1-8b.yaml", "--json", *FITTED))
    split = time_of(megaplan("split", "plans/llama-3.1-8b.yaml", "--json", *FITTED, "-o", "a.json"))
    assert estimate == split == time_of(megaplan("estimate", "a.json", "--json"))
    assert set(estimate) == KEYS
    low, high = estimate["interval"]
    assert low < estimate["step_seconds"] < high
    assert (estimate["basis"], estimate["calibration"]) == ("fitted", "dense")
    assert "step " in megaplan("show", "a.json").out


def test_diff_has_both_times(megaplan):
    megaplan("split", "plans/llama-3.1-8b.yaml", *MEGATRON, "-o", "a.json")
    megaplan("split", "plans/llama-3.1-8b.yaml", *MEGATRON, "--set", "schedule.num_microbatches=32", "-o", "b.json")
    both = time_of(megaplan("diff", "a.json", "b.json", "--json"))
    assert both["after"]["step_seconds"] > 1.5 * both["before"]["step_seconds"]


@pytest.mark.parametrize("words", [("plans/llama-3.1-8b.yaml",), ("plans/nam56r-8xh200.yaml", "--set", "host.kernels=triton")])
def test_host_megarun_has_a_wide_interval_that_says_uncalibrated(megaplan, words):
    time = time_of(megaplan("estimate", *words, "--json"))
    assert set(time) - {"unmeasured"} == KEYS
    assert (time["basis"], time["calibration"]) == ("modelled", "uncalibrated")
    low, high = time["interval"]
    assert high / low > 1.5
    assert low < time["step_seconds"] < high
    assert sum(time["terms"].values()) == pytest.approx(time["step_seconds"], abs=1e-5)
    assert "(modelled, uncalibrated)" in megaplan("estimate", *words).out


def test_a_search_s_row_is_an_estimate_of_its_plan(megaplan):
    """megarun's step is consistent: a search's row, and estimate, split and diff of its plan, state the same."""
    found = json.loads(megaplan("search", "plans/tiny-hybrid-pp2.yaml", "--devices", "4", "--top", "2", "-o", "rows", "--json").out)
    for row in found["best"]:
        time = time_of(megaplan("estimate", row["plan"], "--json"))
        assert time["step_seconds"] == pytest.approx(row["step_seconds"], abs=1e-6)
        assert time["mfu"] == row["mfu"]
        assert time["terms"] == pytest.approx(row["terms"], abs=2e-6)
        both = time_of(megaplan("diff", "plans/tiny-hybrid-pp2.json", row["plan"], "--json"))
        assert both["after"] == time


def test_the_step_says_how_it_changes(megaplan):
    text = megaplan("diff", "plans/nam56r-8xh200-equal.json", "plans/nam56r-8xh200.json").out
    before, after = (
        time_of(megaplan("estimate", f"plans/{name}.json", "--json"))["step_seconds"] for name in ("nam56r-8xh200-equal", "nam56r-8xh200")
    )
    assert f"step: {before:.2f} s → {after:.2f} s ({100 * (after / before - 1):+.1f} %), " in text
    assert f"tokens/s per device ({100 * (before / after - 1):+.1f} %), MFU " in " ".join(text.split())
    assert "step: " not in megaplan("diff", "plans/nam56r-8xh200.json", "plans/nam56r-8xh200.json").out


def test_what_is_not_timed_says_why(megaplan):
    """A depth with an MLP beside experts: the model has no such block."""
    words = (
        "estimate",
        "plans/mixtral-8x7b.yaml",
        *MEGATRON,
        "--set",
        "model.features={mtp: {depth: 1, ffn_hidden_size: 14336, activation: swiglu}}",
    )
    reason = time_of(megaplan(*words, "--json"))["reason"]
    assert reason.startswith("there is no term for ")
    assert f"step: not timed: {reason}" in " ".join(megaplan(*words).out.split())


def test_prediction_depths_take_a_block_and_a_head_each(megaplan):
    words = ("estimate", "plans/llama-3.1-8b.yaml", "--json", *MEGATRON, "--set", "model.mlp.activation=relu2")
    without, one, two = (
        time_of(megaplan(*words, *depths))["step_seconds"]
        for depths in ((), ("--set", MTP), ("--set", MTP.replace("depth: 1", "depth: 2")))
    )
    assert without < one < two


def test_a_schedule_that_is_too_long_to_replay_says_so(megaplan):
    words = ("estimate", "plans/tiny-hybrid-pp2.yaml", "--set", "schedule.num_microbatches=50000", "--json")
    assert time_of(megaplan(*words)) == {"reason": "the schedule has 300,000 actions, and at most 120,000 are replayed"}


def test_an_uncalibrated_device_has_a_wider_interval(megaplan):
    words = ("estimate", "plans/llama-3.1-8b.yaml", "--json", "--set", "host.name=megatron")
    known, unknown = (time_of(megaplan(*words, "--set", f"device.name={name}")) for name in ("h100-sxm", "mi300x"))
    assert (unknown["basis"], unknown["calibration"]) == ("modelled", "uncalibrated")
    ratios = [time["interval"][1] / time["interval"][0] for time in (known, unknown)]
    assert ratios[0] < ratios[1]


def test_steps_of_which_one_alone_has_measured_launches_are_not_compared_without_a_word(megaplan):
    plain, note = "plans/tiny-hybrid.yaml", "includes launches and copies as they were measured"
    for base, other, said in (("h100-sxm", "h200", "after"), ("h200", "b200", "before"), ("h100-sxm", "b200", "")):
        ran = megaplan("estimate", plain, "--set", f"device.name={base}", "--compare", f"device.name={other}")
        printed = " ".join(ran.out.split())
        assert (f"the step {said} the change {note}" in printed) is bool(said)


def test_texts_say_what_pairs_in_turns_hide(megaplan):
    """Estimate, its explanation, and a diff with the plan of pairs in sequence, which alone does not mention turns."""
    attention = "attention: {kind: gqa, num_heads: 16, num_kv_heads: 4, head_dim: 128}"
    experts = "moe: {num_experts: 64, top_k: 8, ffn_hidden_size: 1408, activation: swiglu}"
    model = f"{{pattern: AE, num_layers: 16, hidden_size: 2048, vocab_size: 32768, {attention}, {experts}}}"
    words = [f"model={model}", "mesh={pp: 2, vpp: 2, dp_shard: 8, ep: 8}", "schedule={kind: dualpipev, num_microbatches: 16}"]
    words += ["batch={micro_batch_size: 1, seq_length: 4096}", "device.name=h100-sxm", "split={mode: equal}"]
    given = [word for each in words for word in ("--set", each)]
    for name, turns in (("off", "false"), ("on", "true")):
        megaplan("split", "plans/tiny-hybrid.yaml", *given, "--set", f"host={{moe_overlap: {turns}}}", "-o", f"{name}.json")
    time = time_of(megaplan("estimate", "on.json", "--json"))
    exchanges, hidden = time["exchanges_in_turns"].values()
    assert exchanges > hidden > 0
    assert time["terms"]["exposed_transfers"] == pytest.approx(exchanges - hidden, abs=2e-6)
    text = f"pairs in turns hide {1e3 * hidden:.2f} ms of {1e3 * exchanges:.2f} ms of experts' exchanges"
    assert text in megaplan("estimate", "on.json").out
    assert f"{1e3 * hidden:.2f} ms of exchanges of experts' rows" in megaplan("estimate", "on.json", "--explain").out
    assert f"pairs in turns hide 0 ns → {1e3 * hidden:.2f} ms" in " ".join(megaplan("diff", "off.json", "on.json").out.split())
    assert "in turns" not in megaplan("estimate", "off.json", "--explain").out
    assert "in turns" not in megaplan("diff", "off.json", "off.json").out
