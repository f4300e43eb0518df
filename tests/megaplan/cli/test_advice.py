"""The command with MP501's first hint appended prints the promised numbers, and fits."""

import json
import re
import shlex
from pathlib import Path
from random import Random

import pytest

from megaplan.units import format_bytes, format_ns

ROOT = Path(__file__).parents[3]
SPECS = ("llama-3.1-8b", "mixtral-8x7b", "mamba-codestral-7b", "nam56r-8xh200", "nam56r-8xh200-equal")
CONFIGS = ("Llama-3.2-1B", "Qwen3-8B", "DeepSeek-V2-Lite", "Nemotron-H-8B", "granite-4.0-h-tiny")
DEVICES = ("a100-40gb", "a100-80gb", "h100-sxm", "h200", "b200")
HINT = re.compile(r"hint: (--set .*?)   # peak (\S+ \S+), (leaves|still over by) (\S+ \S+), modelled step [+-]\d+ %(.*)")
STARTS = 20
IN_LANE = 6
"""Starts that are not in the slow set."""


def first_hint(text: str) -> re.Match[str]:
    found = [HINT.fullmatch(line) for line in text.splitlines() if line.startswith("hint: --set")]
    assert found, text
    assert found[0], text
    return found[0]


def configs(folder: Path) -> list[str]:
    """Published configs as files."""
    models = json.loads((ROOT / "tests/megaplan/importers/models.json").read_text(encoding="utf-8"))
    paths = []
    for model in models:
        if model["model"] in CONFIGS:
            path = folder / f"{len(paths)}.json"
            path.write_text(json.dumps({**model["config"], **model.get("released", {})}), encoding="utf-8")
            paths.append(str(path))
    assert len(paths) == len(CONFIGS)
    return paths


def drawn(random: Random, sources: list[str]) -> list[str]:
    """A job that may not fit, and may not be legal."""
    source, sizes = random.choice(sources), [1, 1, 2, 4]
    mesh = {"pp": random.choice(sizes), "dp_shard": random.choice([2, 4, 8]), "tp": random.choice(sizes), "ep": 1, "vpp": 1}
    words = [source, *(f"mesh.{axis}={degree}" for axis, degree in mesh.items())]
    words += [f"batch.micro_batch_size={random.choice([1, 2, 4, 8, 16])}", f"batch.seq_length={random.choice([4096, 8192, 32768])}"]
    words += [f"schedule.num_microbatches={random.choice([4, 8, 16])}", "schedule.kind=" + random.choice(["1f1b", "1f1b", "gpipe"])]
    words += [f"device.name={random.choice(DEVICES)}"]
    if "nam56r" not in source and random.random() < 0.4:
        words += ["host={name: megatron}", f"mesh.vocab_parallel={str(mesh['tp'] > 1).lower()}", "schedule.kind=1f1b"]
    return words


def command(words: list[str]) -> list[str]:
    return ["estimate", words[0], *(part for word in words[1:] for part in ("--set", word))]


@pytest.fixture(params=[IN_LANE, pytest.param(STARTS, marks=pytest.mark.slow)])
def starts(request, megaplan, here):
    """Jobs that do not fit."""
    sources = [*(f"plans/{name}.yaml" for name in SPECS), *configs(here)]
    random, found = Random(23), []
    for _ in range(400):
        words = command(drawn(random, sources))
        ran = megaplan(*words)
        if ran.status == 1 and "MP501" in ran.err:
            found.append((words, ran))
        if len(found) == request.param:
            return found
    raise AssertionError(f"{len(found)} jobs that do not fit")


@pytest.mark.requirement("R-46")
@pytest.mark.jobs
def test_the_first_hint_ends_in_a_fit_within_two_commands(megaplan, starts):
    grown = 0
    for words, ran in starts:
        told, tried, world = ran, list(words), world_size(json.loads(megaplan(*words, "--json").out))
        for _ in range(2):
            hint = first_hint(told.err)
            tried += shlex.split(hint[1])
            told = megaplan(*tried)
            document = json.loads(megaplan(*tried, "--json").out)
            peak = max(rank["peak_bytes"] for rank in document["ranks"])
            assert hint[2] == format_bytes(peak), (tried, hint[0])
            assert f"the largest peak is {hint[2]}" in " ".join(told.out.split()), tried
            now = world_size(document)
            assert hint[5] == ("" if now == world else f", on {now:,} GPUs instead of {world:,}"), tried
            world, grown = now, grown + (now > world)
            if told.status == 0:
                assert (hint[3], hint[4]) == ("leaves", format_bytes(min(rank["headroom_bytes"] for rank in document["ranks"])))
                break
        assert told.status == 0, (words, told.err)
    assert grown <= len(starts) // 2


def world_size(document) -> int:
    return sum(len(rank["ranks"]) for rank in document["ranks"])


def test_faster_changes_are_shown_where_they_are_asked_for(megaplan):
    words = ("estimate", "plans/tiny-hybrid-pp2.yaml")
    plain, asked = megaplan(*words), megaplan(*words, "--advice")
    assert asked.out.startswith(plain.out)
    (first, *_) = json.loads(megaplan(*words, "--advice", "--json").out)["advice"]
    options = " ".join(f"--set {shlex.quote(text)}" for text in first["set"])
    step, peak = format_ns(round(first["step_seconds"] * 1e9)), format_bytes(first["peak_bytes"])
    assert f"  {options}   # step {step} (" in asked.out[len(plain.out) :]
    after = megaplan(*words, *shlex.split(options))
    assert f"step: {step}," in after.out
    assert f"the largest peak is {peak}" in " ".join(after.out.split())
    assert "advice" not in json.loads(megaplan(*words, "--json").out)
