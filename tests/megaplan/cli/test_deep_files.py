"""Files nested beyond what any parser follows are refused by every command that reads one, as files of users."""

from pathlib import Path

import pytest

SPEC, PLAN = "plans/tiny-hybrid.yaml", "plans/tiny-hybrid-pp2.json"
NESTED = {
    "open.json": "[" * 200_000,
    "objects.json": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "lists.json": "[" * 900 + "]" * 900,
    "sections.json": '{"model":' * 900 + "1" + "}" * 900,
    "spec.yaml": "a: " + "[" * 5_000,
    "blocks.yaml": "".join(f"{' ' * depth}a:\n" for depth in range(600)),
    "job.toml": "a = " + "[" * 5_000,
    "keys.toml": "a" + ".a" * 5_000 + " = 1",
}
COMMANDS = [
    ["estimate", "FILE"],
    ["show", "FILE"],
    ["check", "FILE"],
    ["diff", PLAN, "FILE"],
    ["split", SPEC, "--baseline", "FILE"],
    ["estimate", SPEC, "--costs", "FILE"],
    ["estimate", SPEC, "--device-file", "FILE"],
    ["import", "hf", "FILE"],
    ["import", "megatron", "FILE"],
    ["import", "torchtitan", "FILE"],
    ["calibrate", "FILE", "-o", "-"],
    ["calibrate", "benchmarks/gpu/specs", "--profile", "FILE", "-o", "-"],
    ["calibrate", "benchmarks/gpu/specs", "--profile", "benchmarks/results/h200-2026-11-27b.json", "--changed", "FILE", "-o", "-"],
    ["report", "FILE", "-o", "-"],
    ["search", "FILE", "--devices", "8"],
    ["export", "FILE", "--to", "fsdp2"],
    ["timeline", "FILE"],
]


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(word for word in words if word != "FILE"))
def test_a_nested_file_is_refused(words: list[str], name: str, tmp_path: Path, megaplan) -> None:
    path = tmp_path / name
    path.write_text(NESTED[name])
    ran = megaplan(*[str(path) if word == "FILE" else word for word in words])
    assert ran.status == 2
    assert "MP499" not in ran.err
    assert ran.err.startswith("error[MP")
