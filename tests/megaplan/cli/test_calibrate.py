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
        '[{"spec": "plans/llama-3.1-8b.yaml", "step_seconds": 1.0}]',
    ],
    ids=["empty", "text", "no time", "zero", "megarun"],
)
def test_what_is_no_measured_step_is_refused(megaplan, here, text):
    (here / "rows.json").write_text(text)
    ran = megaplan("calibrate", "rows.json", "--json")
    assert ran.status == 2
    assert [found["code"] for found in json.loads(ran.out)["diagnostics"]] == ["MP487"]
