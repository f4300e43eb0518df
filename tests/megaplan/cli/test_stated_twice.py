"""Options that name a device or a length: hints that can be pasted, and contradictions with --set."""

import re
import shlex

import pytest

SPEC = "plans/tiny-hybrid-pp2.yaml"


def hints(err: str) -> list[str]:
    return [shlex.join(shlex.split(line)) for line in re.findall(r"^hint: (--.*)$", err, re.MULTILINE)]


@pytest.mark.parametrize("name", ["4090", "rtx4090", "H300", "h100-x", "1e5", "null"])
@pytest.mark.parametrize("command", ["estimate", "search"])
def test_a_hint_for_an_unknown_device_is_the_same_option(megaplan, command, name):
    ran = megaplan(command, SPEC, "--device", name)
    assert ran.status == 2
    assert "MP504" in ran.err
    found = hints(ran.err)
    assert found
    if command == "estimate":
        assert megaplan(command, SPEC, *shlex.split(found[0])).status == 0


@pytest.mark.parametrize("value", ["4090", "1e5", "true", "2026"])
def test_a_hint_with_quotes_survives_the_shell(megaplan, value):
    """After the shell has parsed the hint, the value is still a text, which is no device."""
    (hint,) = hints(megaplan("estimate", SPEC, "--set", f"device.name={value}").err)
    again = megaplan("estimate", SPEC, *shlex.split(hint))
    assert "MP504" in again.err
    assert "MP127" not in again.err


@pytest.mark.parametrize("command", ["estimate", "search"])
@pytest.mark.parametrize(
    ("option", "override"),
    [
        (("--device", "h100"), "device.name=b200"),
        (("--device", "h100"), "device=b200"),
        (("--device", "h100"), "device={name: b200}"),
        (("--seq", "64"), "batch.seq_length=128"),
    ],
)
def test_an_option_and_an_override_that_differ_are_refused(megaplan, command, option, override):
    ran = megaplan(command, SPEC, *option, "--set", override)
    assert ran.status == 2
    assert "MP480" in ran.err
    assert f"--set gives {override.partition('=')[0].partition('.')[0]}" in ran.err
    kept = hints(ran.err)
    assert len(kept) == 2
    if command == "estimate":
        assert all(megaplan(command, SPEC, *shlex.split(hint)).status == 0 for hint in kept)


@pytest.mark.parametrize(
    "override",
    ["device.name=h100-sxm", "device.name=h100", "device=H100", 'device.name="h100"', "device.capacity=42949672960", "device={}"],
)
def test_an_override_that_agrees_is_no_contradiction(megaplan, override):
    assert megaplan("estimate", SPEC, "--device", "h100", "--set", override).status == 0
