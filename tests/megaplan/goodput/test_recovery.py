"""Figures of recoveries: their pages, their tables, and spares."""

import re
from pathlib import Path
from statistics import median

import pytest

import megaplan
from megaplan.goodput.figures import REQUEUE_SECONDS, by_devices, figures
from megaplan.goodput.recovery import Faults, faults_of

ROOT = Path(__file__).parents[3]


def faults(*changes: str, step: float = 2.0) -> Faults:
    return faults_of(megaplan.load("plans/llama-3.1-8b.yaml", *changes).spec, step)


def test_detection_is_that_of_the_table_of_faults() -> None:
    rows = [
        line.split("|")[1:-1] for line in (ROOT / "docs/reference/faults.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"
    ]
    seconds = {
        what: [float(row[-2]) for row in rows if re.match(what, row[0].strip())] for what in (r"kill -9 of rank \d in", "SIGSTOP to")
    }
    crashes = [float(row[-2]) for row in rows if re.match(r" kill -9 of rank \d in step", row[0]) and row[4].strip() == "1"]
    assert len(crashes) >= 10
    assert figures()["crash_detection_seconds"].value == pytest.approx(median(crashes), abs=0.5)
    assert figures()["hang_margin_seconds"].value == pytest.approx(median(seconds["SIGSTOP to"]) - 4, abs=2)


def test_every_figure_names_its_source_and_basis() -> None:
    for name, figure in figures().items():
        assert figure.source, name
        assert figure.value > 0, name


def test_a_queue_time_is_interpolated_and_held_at_the_ends() -> None:
    values = [by_devices("x", REQUEUE_SECONDS, devices).value for devices in (8, 2048, 3000, 4096, 16384, 10**6)]
    assert values == sorted(values)
    assert values[0] == values[1] == 454
    assert values[3] == 545
    assert values[-1] == 768


def test_more_spares_are_free_more_often() -> None:
    found = faults("run.mtbf=100h")
    free = [found.has_spare(count) for count in range(12)]
    assert free[0] == 0.0
    assert free == sorted(free)
    assert found.recovery(10.0, num_spares=8).seconds <= found.recovery(10.0, num_spares=0).seconds


def test_given_times_replace_the_figures() -> None:
    found = faults("run={detection: 1min, restart: 2min, replacement: 1h, spares: 0, hangs: 0.5}")
    assert found.detection == 60
    assert found.recovery(10.0).replacement == pytest.approx(0.78 * 3600)
    assert found.figures["restart"].basis == "given"


def test_a_long_step_lengthens_the_time_limit_of_hangs() -> None:
    assert faults(step=2.0).timeout.value == 300
    assert faults(step=120.0).timeout.value == 600
    assert faults("host={name: megatron, model: gpt}", step=120.0).timeout.value == 600
