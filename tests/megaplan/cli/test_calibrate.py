"""`megaplan calibrate` finds the share that made the measured steps, and stays near the constants where there are few."""

import json

import pytest

SIZES = (1, 2, 4)
DEVICE = ("host.name=megatron", "device.name=h200")


@pytest.fixture
def measured(megaplan, here):
    """Writes rows of steps that a device which reaches `share` would take."""

    def write(share: float, sizes=SIZES) -> None:
        rows = []
        for size in sizes:
            values = [*DEVICE, f"batch.micro_batch_size={size}"]
            words = [word for value in (*values, f"device.reached={{bf16: {share}}}") for word in ("--set", value)]
            time = json.loads(megaplan("estimate", "plans/llama-3.1-8b.yaml", "--json", *words).out)["time"]
            rows.append({"spec": "plans/llama-3.1-8b.yaml", "set": values, "step_seconds": time["step_seconds"]})
        (here / "rows.json").write_text(json.dumps(rows))

    return write


def calibrated(megaplan) -> dict:
    (found,) = json.loads(megaplan("calibrate", "rows.json", "--json").out)["calibrations"]
    return found


@pytest.mark.parametrize("share", [0.55, 0.85])
def test_many_steps_outweigh_the_constants(megaplan, measured, share):
    measured(share, SIZES * 8)
    found = calibrated(megaplan)
    assert found["device"] == "h200"
    assert found["reached"]["bf16"] == pytest.approx(share, rel=0.02)
    assert all(abs(row["error_after"]) < 0.02 < abs(row["error_before"]) for row in found["rows"])


def test_one_step_moves_the_share_part_of_the_way_and_narrows_it(megaplan, measured):
    measured(0.55, (1,))
    one = calibrated(megaplan)
    measured(0.55)
    three = calibrated(megaplan)
    assert 0.55 < three["reached"]["bf16"] < one["reached"]["bf16"] < one["before"]
    assert three["spread"] < one["spread"]


def test_the_residual_is_said_by_term(megaplan, measured, here):
    """Each term has the factor that alone would explain the rest of the error."""
    measured(0.55, (1,))
    found = calibrated(megaplan)
    (row,), seconds = found["rows"], json.loads((here / "rows.json").read_text())[0]["step_seconds"]
    gemm, memory = row["terms"]["gemm"], row["terms"]["memory"]
    assert gemm["seconds_after"] > gemm["seconds_before"]
    for term in (gemm, memory):
        assert term["seconds_after"] * (term["factor"] - 1) == pytest.approx(-row["error_after"] * seconds, rel=0.02)
    text = megaplan("calibrate", "rows.json").out
    assert "terms of row 0" in text
    assert f"{gemm['factor']:.2f}" in text


def test_the_file_and_the_text_say_the_same(megaplan, measured, here):
    measured(0.6)
    ran = megaplan("calibrate", "rows.json", "-o", "device.json")
    share = json.loads((here / "device.json").read_text())["calibrations"][0]["reached"]["bf16"]
    assert f"reached: {{bf16: {share:.3f}}}" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "no json",
        '[{"spec": "plans/llama-3.1-8b.yaml"}]',
        '[{"spec": "plans/llama-3.1-8b.yaml", "step_seconds": 0}]',
        '[{"spec": "plans/llama-3.1-8b.yaml", "step_seconds": 1e308}]',
        '[{"spec": "plans/tiny-hybrid.yaml", "step_seconds": 1},'
        ' {"spec": "plans/llama-3.1-8b.yaml", "set": ["host.name=megatron"], "step_seconds": 1}]',
        '[{"spec": "plans/llama-3.1-8b.yaml", "set": ["mesh.pp=64", "schedule.num_microbatches=4096"], "step_seconds": 1.0}]',
    ],
    ids=["empty", "text", "no time", "zero", "longer than any", "two hosts", "no model of its time"],
)
def test_what_is_no_measured_step_is_refused(megaplan, here, text):
    (here / "rows.json").write_text(text)
    ran = megaplan("calibrate", "rows.json", "--json")
    assert ran.status == 2
    assert [found["code"] for found in json.loads(ran.out)["diagnostics"]] == ["MP487"]


def run_of(here, megaplan, seconds, *values) -> None:
    """The folder of a run whose steps took `seconds`, of which a tenth went into reading rows."""
    (here / "run").mkdir()
    words = [word for value in values for word in ("--set", value)]
    assert megaplan("split", "plans/tiny-hybrid-pp2.yaml", *words, "-o", "run/plan.json").status == 0
    lines = [json.dumps({"step": step, "step_seconds": second / 0.9, "data_seconds": second / 9}) for step, second in enumerate(seconds, 1)]
    others = [json.dumps({"step": 2, "rank_allocated_bytes": [1]}), '{"step": 3, "step_sec']
    (here / "run" / "metrics.jsonl").write_text("\n".join([*lines[:2], others[0], *lines[2:], others[1]]) + "\n")


def test_a_run_of_megarun_is_its_median_step_under_its_plan(megaplan, here):
    """The first step does not count, nor the time for reading; with the run's share, the estimate equals the measured step."""
    values = ("precision.params=bf16", "batch.seq_length=4096", "model.hidden_size=4096", "model.num_layers=10")
    words = [word for value in values for word in ("--set", value)]
    slow = json.loads(megaplan("estimate", "plans/tiny-hybrid-pp2.yaml", *words, "--set", "device.reached={bf16: 0.4}", "--json").out)
    seconds = slow["time"]["step_seconds"]
    run_of(here, megaplan, [50.0, seconds, seconds * 1.02, seconds * 0.98, seconds], *values)
    (found,) = json.loads(megaplan("calibrate", "run", "--json", "-o", "device.json").out)["calibrations"]
    (row,) = found["rows"]
    assert found["device"] == "h200"
    assert row["error_before"] < row["error_after"] < 0
    assert 0.4 < found["reached"]["bf16"] < found["before"]
    after = json.loads(megaplan("estimate", "run/plan.json", "--device-file", "device.json", "--json").out)["time"]["step_seconds"]
    assert after / seconds - 1 == pytest.approx(row["error_after"], abs=2e-3)


@pytest.mark.parametrize("broken", ["few", "no metrics", "no plan", "another device"])
def test_a_run_that_says_too_little_is_refused(megaplan, here, broken):
    run_of(here, megaplan, [100.0 if broken == "another device" else 1.0] * (3 if broken == "few" else 9))
    for name in ("metrics.jsonl", "plan.json"):
        if broken == f"no {name.split('.')[0]}":
            (here / "run" / name).unlink()
    ran = megaplan("calibrate", "run", "--json")
    assert ran.status == 2
    assert [found["code"] for found in json.loads(ran.out)["diagnostics"]] == ["MP101" if broken == "no plan" else "MP487"]


def test_every_measured_step_of_megarun_moves_its_share(megaplan, here):
    rows = [{"spec": "plans/llama-3.1-8b.yaml", "step_seconds": 8.0}] * 12
    (here / "rows.json").write_text(json.dumps(rows))
    found = calibrated(megaplan)
    assert found["reached"]["bf16"] < found["before"]
    assert all(abs(row["error_after"]) < 0.02 < abs(row["error_before"]) for row in found["rows"])


def write_shares(here, **devices: dict[str, float]) -> None:
    found = [{"device": name.replace("_", "-"), "reached": shares} for name, shares in devices.items()]
    (here / "device.json").write_text(json.dumps({"format": "megaplan.calibration/1", "calibrations": found}))


@pytest.mark.parametrize("host", ["megatron", "megarun"])
def test_a_device_file_is_what_its_share_set_by_hand_is(megaplan, here, host):
    """In an estimate, a split and a search; of the file's devices the spec's, and of its dtypes all."""
    write_shares(here, h200={"bf16": 0.41}, h100_sxm={"bf16": 0.9})
    words = ("plans/llama-3.1-8b.yaml", "--set", f"host.name={host}", "--set", "device.name=h200", "--json")
    by_hand = json.loads(megaplan("estimate", *words, "--set", "device.reached={bf16: 0.41}").out)["time"]
    assert by_hand["step_seconds"] > json.loads(megaplan("estimate", *words).out)["time"]["step_seconds"]
    for command in (("estimate",), ("split", "-o", "plan.json")):
        assert json.loads(megaplan(command[0], *words, *command[1:], "--device-file", "device.json").out)["time"] == by_hand
    assert json.loads((here / "plan.json").read_text())["inputs"]["device"]["reached"] == {"bf16": "0.41"}


def test_a_search_takes_a_device_file(megaplan, here):
    write_shares(here, h200={"bf16": 0.3})
    words = ("search", "plans/tiny-hybrid-pp2.yaml", "--set", "precision.params=bf16", "--devices", "2", "--top", "1", "--json")
    slow, fast = (json.loads(megaplan(*words, *more).out)["best"][0] for more in (("--device-file", "device.json"), ()))
    assert slow["terms"]["layers"] > fast["terms"]["layers"]


def test_a_share_that_is_set_counts_before_the_file_s(megaplan, here):
    write_shares(here, h200={"bf16": 0.41})
    words = ("estimate", "plans/llama-3.1-8b.yaml", "--set", "host.name=megatron", "--set", "device.name=h200", "--json")
    own = ("--set", "device.reached={bf16: 0.5}")
    both, one = (json.loads(megaplan(*words, *own, *more).out)["time"] for more in (("--device-file", "device.json"), ()))
    assert both == one


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a document of format megaplan.calibration/1"),
        ('{"format": "megaplan.calibration/1", "calibrations": [{"reached": {"bf16": 0.5}}]}', "calibrations[0]"),
        ('{"format": "megaplan.calibration/1", "calibrations": [{"device": "b200", "reached": {"bf16": 0.5}}]}', "shares of b200"),
    ],
)
def test_another_file_is_refused(megaplan, here, text, says):
    (here / "device.json").write_text(text)
    ran = megaplan("estimate", "plans/tiny-hybrid.yaml", "--device-file", "device.json")
    assert ran.status == 2
    assert "error[MP491]" in ran.err
    assert says in ran.err


def test_a_share_above_one_is_the_spec_s_error(megaplan, here):
    write_shares(here, h200={"bf16": 1.5})
    ran = megaplan("estimate", "plans/tiny-hybrid.yaml", "--device-file", "device.json")
    assert ran.status == 2
    assert "device.reached" in ran.err


TABLES = {
    "rows.yaml": "- {spec: plans/llama-3.1-8b.yaml, set: [host.name=megatron, device.name=h200], step_seconds: 5.0}\n",
    "one.yaml": "spec: plans/llama-3.1-8b.yaml\nset: [host.name=megatron, device.name=h200]\nstep_seconds: 5.0\n",
    "rows.csv": "spec, step_seconds, host.name, device.name\nplans/llama-3.1-8b.yaml, 5.0, megatron, h200\n",
    "rows.json": '[{"spec": "plans/llama-3.1-8b.yaml", "set": ["host.name=megatron", "device.name=h200"], "step_seconds": 5.0}]',
}


def test_every_form_of_a_step_is_the_same_step(megaplan, here):
    found = []
    for name, text in TABLES.items():
        (here / name).write_text(text)
        found.append(json.loads(megaplan("calibrate", name, "--json").out)["calibrations"][0]["reached"])
    words = [word for value in DEVICE for word in ("--set", value)]
    given = megaplan("calibrate", "plans/llama-3.1-8b.yaml", "--step-seconds", "5.0", *words, "--json")
    found.append(json.loads(given.out)["calibrations"][0]["reached"])
    assert len({each["bf16"] for each in found}) == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rows.csv", "spec, step_seconds\nplans/llama-3.1-8b.yaml, soon\n", ()),
        ("rows.csv", "spec\nplans/llama-3.1-8b.yaml\n", ()),
        ("rows.yaml", "spec: plans/llama-3.1-8b.yaml\n", ()),
        ("rows.json", TABLES["rows.json"], ("--set", "mesh.dp_shard=2")),
        ("rows.json", TABLES["rows.json"], ("--step-seconds", "-1")),
    ],
)
def test_a_table_that_is_wrong_is_refused(megaplan, here, name, text, words):
    (here / name).write_text(text)
    ran = megaplan("calibrate", name, *words, "--json")
    assert ran.status == 2
    assert [found["code"] for found in json.loads(ran.out)["diagnostics"]] == ["MP487"]
