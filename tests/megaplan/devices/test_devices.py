"""Every device's figures have a basis and a source, are in the order that the data sheets have, and can be replaced in a spec."""

import itertools
import json
from pathlib import Path

import pytest

from megaplan.budget.values import device_budget
from megaplan.cli.main import run
from megaplan.columns import Basis
from megaplan.cost.rates import rates_of
from megaplan.devices import device_names, load_device
from megaplan.dtypes import DType
from megaplan.errors import MegaplanError
from megaplan.spec.host import DeviceRef, device_of
from megaplan.spec.load import spec_from_document

WANTED = {
    *("a100-40gb", "a100-80gb", "a800-80gb", "h100-sxm", "h100-sxm-500w", "h100-nvl", "h100-pcie", "h800-sxm", "h20", "h200"),
    *("b200", "b300", "gb200", "gb300", "rtx-pro-6000", "gb10", "vr200", "mi300x", "mi355x"),
    *("tpu-v5p", "tpu-v6e", "tpu-v7"),
}
NEVER_RUN = {"rtx-pro-6000", "gb10", "vr200", "mi300x", "mi355x", "tpu-v5p", "tpu-v6e", "tpu-v7"}
SHEETS = {  # bf16, fp8 and fp4 TFLOP/s without sparsity, memory, link and adapter in GB/s, domain
    "a800-80gb": (312, None, None, 2039, 200, 25, 8),
    "h800-sxm": (989, 1979, None, 3350, 200, 50, 8),
    "h20": (148, 296, None, 4000, 450, 50, 8),
    "rtx-pro-6000": (503.8, 1007.6, 2015.2, 1792, 64, 50, 8),
    "gb10": (125, 250, 500, 273, 25, 25, 1),
    "vr200": (4000, 17500, 35000, 22000, 1800, 200, 64),
    "tpu-v5p": (459, 459, None, 2765, 600, 6.25, 8960),
    "tpu-v6e": (918, 918, None, 1638, 400, 12.5, 256),
    "tpu-v7": (1153.5, 2307, None, 3690, 300, 6.25, 18432),
}
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "devices.md"


def spec_with(device: dict) -> object:
    return spec_from_document(
        {
            "format": "megaplan.spec/1",
            "name": "one",
            "model": {
                **{"hidden_size": 256, "vocab_size": 512, "pattern": "D", "num_layers": 1},
                "mlp": {"ffn_hidden_size": 512},
            },
            "batch": {"micro_batch_size": 1, "seq_length": 128},
            "device": device,
        }
    )


def figures(device):
    return [
        *(device.capacity, device.gemm_workspace, device.memory_bandwidth, device.node_bandwidth, device.network_bandwidth),
        *(device.domain, device.num_sms, device.launch, device.collective_latency, device.recurrence_step),
        *(figure for _, figure in device.reserve),
        *device.peak_flops.values(),
        *device.efficiency.values(),
    ]


def test_the_data_file_has_the_devices_that_people_train_on():
    assert set(device_names()) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_figure_has_a_basis_and_a_source(name):
    for figure in figures(load_device(name)):
        assert figure.value > 0 or figure is load_device(name).gemm_workspace  # XLA has none
        assert figure.basis in {Basis.PUBLISHED, Basis.MODELLED, Basis.MEASURED}
        assert figure.source


@pytest.mark.parametrize("name", sorted(WANTED))
def test_figures_agree_with_each_other(name):
    device = load_device(name)
    peaks = [device.peak_flops[dtype].value for dtype in ("fp32", "bf16", "fp8", "fp4") if dtype in device.peak_flops]
    assert peaks == sorted(peaks)
    assert device.peak_flops.get("fp16", device.peak_flops["bf16"]).value == device.peak_flops["bf16"].value
    assert device.network_bandwidth.value <= device.node_bandwidth.value < device.memory_bandwidth.value
    assert device.network_bandwidth.value < device.node_bandwidth.value or device.domain.value == 1
    assert device_budget(device, 8).usable_bytes > device.capacity.value * 0.9


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_figures_are_those_of_the_data_sheet(name):
    device = load_device(name)
    peaks = [device.peak_flops[dtype].value / 10**12 if dtype in device.peak_flops else None for dtype in ("bf16", "fp8", "fp4")]
    rates = [rate.value / 10**9 for rate in (device.memory_bandwidth, device.node_bandwidth, device.network_bandwidth)]
    assert (*peaks, *rates, device.domain.value) == SHEETS[name]


def test_more_memory_in_each_next_part():
    names = ("a100-40gb", "a100-80gb", "h100-nvl", "h200", "b200", "gb200", "b300", "gb300")
    capacities = [load_device(name).capacity.value for name in names]
    assert capacities == sorted(capacities)


def test_only_what_was_never_run_has_a_note():
    assert {name for name in WANTED if load_device(name).note} == NEVER_RUN


def test_every_figure_can_be_given_in_a_spec():
    given = {
        "name": "gb200",
        "capacity": 10**11,
        "reserve": {"nccl": 7, "other": 11},
        "peak_flops": {"bf16": 10**15},
        "memory_bytes_per_second": 10**12,
        "node_bytes_per_second": 10**11,
        "network_bytes_per_second": 10**10,
        "domain": 72,
        "reached": {"bf16": 0.5},
    }
    spec, sheet = spec_with(given), load_device("gb200")
    device = device_of(spec.device)
    assert (device.capacity.value, device.domain.value, device.capacity.basis) == (10**11, 72, Basis.GIVEN)
    kept = sum(figure.value for item, figure in sheet.reserve if item != "nccl")
    assert device_budget(device, 8).usable_bytes == 10**11 - kept - 7 - 11
    assert device.peak_flops["fp8"] == sheet.peak_flops["fp8"]
    rates = rates_of(spec)
    assert rates.compute_ns(10**9, "D", DType.BF16) == 10**9 // (10**6 * 0.5)  # of the given peak, the given share
    assert rates.memory_ns(85 * 10**9) == 10**8
    assert spec_from_document(spec.as_document()) == spec


def test_a_section_without_figures_is_written_as_before():
    assert set(DeviceRef().model_dump(mode="json")) == {
        *("name", "per_node", "efficiency_percent", "launch_ns", "collective_latency_ns", "recurrence_step_ns"),
    }


def test_the_figures_of_the_file_are_shared_and_never_changed_by_a_spec():
    before = load_device("h200")
    device_of(spec_with({"name": "h200", "reserve": {"driver": 0}, "capacity": 10**12}).device)
    assert load_device("h200") == before
    assert device_of(DeviceRef()) is before


def test_an_emulated_dtype_can_be_given_a_peak():
    with pytest.raises(MegaplanError) as raised:
        spec_with_precision({"name": "a100-80gb"})
    assert [found.code for found in raised.value.diagnostics] == ["MP506"]
    spec = spec_with_precision({"name": "a100-80gb", "peak_flops": {"fp8": 312 * 10**12}})
    assert rates_of(spec).compute_ns(10**12, "D", DType.FP8) > 0


def spec_with_precision(device: dict) -> object:
    document = spec_with({"name": "h200"}).as_document()
    return spec_from_document(document | {"device": device, "precision": {"params": "fp8"}})


def test_what_products_reach_is_listed_with_its_basis(capsys):
    assert run(["devices", "--json"]) == 0
    found = {device["name"]: device["reached"] for device in json.loads(capsys.readouterr().out)["devices"]}
    assert set(found) == WANTED
    for shares in found.values():
        assert all(0 < share["value"] < 1 and share["basis"] in {"fitted", "modelled"} for share in shares.values())
    assert found["h100-sxm"]["bf16"]["basis"] == "fitted"
    assert found["mi300x"]["bf16"]["basis"] == "modelled"
    assert "nvfp4" not in found["h100-sxm"]
    assert set(found["a100-80gb"]) == {"bf16"}


def test_the_page_has_the_table_that_the_command_prints(capsys):
    assert run(["devices"]) == 0
    printed = capsys.readouterr().out
    page = PAGE.read_text(encoding="utf-8")
    for line in itertools.islice(printed.splitlines(), 1 + len(WANTED)):
        assert line in page
