"""`megaplan project`: a measured step fixes the rates, and the layout grows or is searched again."""

import json

import pytest

from megaplan.cli.project import numbers
from megaplan.errors import MegaplanError

SET = ["host={name: megatron, model: gpt}", "recompute={}", "device.name=h100-sxm", "mesh={dp_shard: 8}", "schedule={num_microbatches: 4}"]


@pytest.fixture
def rows(here):
    path = here / "rows.json"
    path.write_text(json.dumps([{"spec": "plans/llama-3.1-8b.yaml", "set": [*SET, "batch.seq_length=4096"], "step_seconds": 1.3}]))
    return "rows.json"


def document(ran):
    assert ran.status == 0, ran.err
    return json.loads(ran.out)


def test_the_data_axis_grows(megaplan, rows):
    found = document(megaplan("project", rows, "--to", "8..64", "--keep-layout", "--json"))
    assert [point["devices"] for point in found["points"]] == [8, 16, 32, 64]
    assert [point["layout"] for point in found["points"]] == [[], ["mesh.dp_shard=16"], ["mesh.dp_shard=32"], ["mesh.dp_shard=64"]]
    first = found["points"][0]
    assert first["step_seconds"] == pytest.approx(found["modelled_seconds"], rel=1e-6)
    assert first["efficiency"] == pytest.approx(1.0, rel=1e-6)
    efficiencies = [point["efficiency"] for point in found["points"]]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert all(point["low"] < point["step_seconds"] < point["high"] for point in found["points"])


def test_a_faster_measured_step_gives_faster_steps(megaplan, rows, here):
    slow = document(megaplan("project", rows, "--to", "16", "--keep-layout", "--json"))
    (here / rows).write_text((here / rows).read_text().replace("1.3", "1.2"))
    fast = document(megaplan("project", rows, "--to", "16", "--keep-layout", "--json"))
    assert fast["share"] > slow["share"]
    assert fast["points"][0]["step_seconds"] < slow["points"][0]["step_seconds"]


def test_mixed_pools_grow_with_the_data_axis(megaplan, here):
    """Each type of device keeps its stages, and has as many times more devices as the job."""
    pools = ["mesh={pp: 2, dp_shard: 4}", "pools=[{count: 4, device: {name: h200}}]"]
    spec = {"spec": "plans/llama-3.1-8b.yaml", "set": ["device.name=h100-sxm", *pools], "step_seconds": 6.0}
    (here / "rows.json").write_text(json.dumps([spec]))
    found = document(megaplan("project", "rows.json", "--to", "16,32", "--keep-layout", "--json"))
    assert [point["layout"] for point in found["points"]] == [["mesh.dp_shard=8"], ["mesh.dp_shard=16"]]


def test_a_search_fits_and_is_no_slower_than_what_fits(megaplan, rows):
    (kept,) = document(megaplan("project", rows, "--to", "16", "--keep-layout", "--json"))["points"]
    (found,) = document(megaplan("project", rows, "--to", "16", "--processes", "1", "--json"))["points"]
    assert found["devices"] == 16
    assert found["headroom_bytes"] >= 0
    assert kept["headroom_bytes"] < 0 or found["step_seconds"] <= kept["step_seconds"] * (1 + 1e-9)


def test_the_text_has_every_point(megaplan, rows):
    out = megaplan("project", rows, "--to", "16,64", "--keep-layout").out
    assert "measured on 8 h100-sxm" in out
    assert "64: mesh.dp_shard=64" in out


@pytest.mark.parametrize(
    ("to", "text"), [("12", "12 devices"), ("4", "4 devices"), ("64..", "--to 64..4096"), ("many", "--to 64..4096"), ("64..8", "0 numbers")]
)
def test_other_numbers_are_refused(megaplan, rows, to, text):
    ran = megaplan("project", rows, "--to", to, "--keep-layout")
    assert ran.status == 2
    assert "MP473" in ran.err
    assert text in ran.err


def test_a_range_doubles():
    assert numbers("64..4096") == (64, 128, 256, 512, 1024, 2048, 4096)
    assert numbers("8, 24") == (8, 24)
    with pytest.raises(MegaplanError):
        numbers("0..8")
