"""Launch options that were measured on a device: which file and entry a launch has, and that the files follow from measurements."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from gpu import changed, tuned

from megakernels._common import tuning
from megakernels._common.tuning import CANDIDATES, FOLDER, forced, launch_options

ROOT = Path(__file__).parents[2]

DEFAULT = {"num_warps": 8}
ROW = {"kernel": "mamba3_group_kernel", "case": "a", "constants": {"M": 64}, "warps": 8, "stages": None, "us": 500.0}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files of devices in their own folder, and the device that is present."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.tuned.cache_clear()

    def write(name, kernels, capability=(9, 0)):
        rows = [{"kernel": "k", "when": when, "options": options} for when, options in kernels]
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"format": tuning.FORMAT, "device": name, "capability": capability, "kernels": rows})
        )

    def run_on(name, capability=(9, 0)):
        properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    yield write, run_on
    tuning.tuned.cache_clear()


def options_on_a_gpu(constants):
    return launch_options("k", DEFAULT, constants, torch.device("meta"))


def test_a_device_has_its_own_file_and_else_one_of_its_capability(files):
    write, run_on = files
    write("h100", [({}, {"num_warps": 2})])
    write("h200", [({}, {"num_warps": 4})])
    for name, capability, warps in (
        ("NVIDIA H200", (9, 0), 4),
        ("h100-sxm", (9, 0), 2),
        ("NVIDIA GH2000", (9, 0), 2),
        ("NVIDIA B200", (10, 0), 8),
        ("", (9, 0), 2),
    ):
        run_on(name, capability)
        assert options_on_a_gpu({"M": 1})["num_warps"] == warps, name


def test_only_launches_with_the_measured_constants_have_measured_options(files):
    write, run_on = files
    write("h200", [({"M": 64, "PACKED": False}, {"num_warps": 4, "num_stages": 3})])
    run_on("NVIDIA H200")
    assert options_on_a_gpu({"M": 64, "PACKED": False, "N": 3}) == {"num_warps": 4, "num_stages": 3}
    assert options_on_a_gpu({"M": 64, "PACKED": True, "N": 3}) == DEFAULT
    assert options_on_a_gpu({"M": 64}) == DEFAULT
    assert launch_options("k", DEFAULT, {"M": 64, "PACKED": False}, torch.device("cpu")) == DEFAULT


def test_a_measurement_gives_its_own_options(files):
    write, run_on = files
    write("h200", [({}, {"num_warps": 4})])
    run_on("NVIDIA H200")
    with forced(lambda kernel, _constants, default: {"num_warps": 2 * default["num_warps"]} if kernel == "k" else None):
        assert options_on_a_gpu({})["num_warps"] == 16
        with forced(lambda *_: None):
            assert options_on_a_gpu({})["num_warps"] == 16
    assert options_on_a_gpu({})["num_warps"] == 4


def test_a_file_of_another_format_is_refused(files, tmp_path):
    (tmp_path / "h200.json").write_text(json.dumps({"format": "other/2", "kernels": []}))
    with pytest.raises(ValueError, match="make gpu ONLY=tune"):
        tuning.tuned("h200", (9, 0))


@pytest.mark.parametrize(
    ("others", "adopted"),
    [
        ([{"warps": 4, "stages": None, "us": 400.0}], {"num_warps": 4}),
        ([{"warps": 4, "stages": None, "us": 485.0}], None),  # 3 %
        ([{"warps": 4, "stages": None, "us": 400.0, "right": False}], None),
        ([{"warps": 2, "stages": None, "us": 100.0}], None),  # no candidate
        ([], None),
    ],
)
def test_options_are_adopted_that_are_faster_and_right(others, adopted):
    found = list(tuned.choices([ROW | {"others": others}]))
    assert [each.options for each in found] == ([] if adopted is None else [adopted])


def test_cases_with_equal_constants_count_together():
    """Faster in one case, slower in the other: 900 of 1,000 µs is adopted, 990 is not."""
    for slower, count in ((500.0, 1), (590.0, 0)):
        rows = [ROW | {"case": case, "others": [{"warps": 4, "stages": None, "us": us}]} for case, us in (("a", 400.0), ("b", slower))]
        found = list(tuned.choices(rows))
        assert len(found) == count
        assert all((each.before_us, each.after_us, each.cases) == (1000.0, 900.0, ("a", "b")) for each in found)


def test_a_form_with_fixed_options_is_not_changed():
    others = [{"warps": 4, "stages": 3, "us": 100.0}]
    for queries in (True, False):
        row = ROW | {"kernel": "ssd_edge_kernel", "constants": {"QUERIES": queries}, "others": others}
        assert bool(list(tuned.choices([row]))) == queries


def test_the_committed_files_follow_from_the_results(tmp_path):
    """Remedy: the first command of benchmarks/gpu/tuned.py; python benchmarks/gpu/changed.py."""
    files = [ROOT / f"benchmarks/results/h200-2026-11-{day}.json" for day in ("27", "27c")]
    assert tuned.write(files, tmp_path).read_text() == (FOLDER / "h200.json").read_text()
    assert changed.text() == changed.CHANGED.read_text()
    kernels = {row["kernel"] for row in json.loads((FOLDER / "h200.json").read_text())["kernels"]}
    assert kernels <= CANDIDATES.keys()
    assert Path(changed.CHANGED).name == "h200-changed-kernels.json"
