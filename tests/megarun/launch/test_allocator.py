"""The allocator's setting: what an environment says, what the runtime adds to it, and what differs from the plan."""

import pytest

from megarun.launch.allocator import RUNTIME, TORCHS_DEFAULT, allocator_setting, differs_from_plan, set_allocator


@pytest.mark.parametrize(
    ("environment", "expandable", "source"),
    [
        ({}, False, TORCHS_DEFAULT),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:False"}, False, "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:4],expandable_segments:True"}, True, "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False, TORCHS_DEFAULT),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, False, "PYTORCH_ALLOC_CONF"),
    ],
)
def test_setting_is_read_as_torch_reads_it(environment: dict[str, str], expandable: bool, source: str) -> None:
    found = allocator_setting(environment)
    assert (found.expandable_segments, found.source) == (expandable, source)


def test_runtime_adds_to_the_users_other_options() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    found = set_allocator(True, environment)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    assert (found.expandable_segments, found.source) == (True, RUNTIME)
    assert allocator_setting(environment).raw == found.raw


def test_runtime_sets_an_empty_environment() -> None:
    environment: dict[str, str] = {}
    assert set_allocator(True, environment).source == RUNTIME
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_setting(environment).expandable_segments


@pytest.mark.parametrize("value", ["expandable_segments:False", "backend:cudaMallocAsync"])
def test_what_the_user_says_stays_and_is_said(value: str) -> None:
    environment = {"PYTORCH_ALLOC_CONF": value}
    found = set_allocator(True, environment)
    assert environment == {"PYTORCH_ALLOC_CONF": value}
    line = differs_from_plan(found, True)
    assert line is not None
    assert "PYTORCH_ALLOC_CONF" in line
    assert "host.expandable_segments = true" in line


def test_plan_without_expandable_segments_leaves_the_environment() -> None:
    environment: dict[str, str] = {}
    found = set_allocator(False, environment)
    assert environment == {}
    assert differs_from_plan(found, False) is None
