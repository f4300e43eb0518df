"""Lines of progress off a terminal."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarun.metrics import display
from megarun.metrics.display import SECONDS_BETWEEN_LINES, Display, step_text

STEP = {"loss": 1.0, "tokens_per_second": 12_345.0, "mfu": None, "learning_rate": 3e-4, "grad_norm": 0.918, "allocated_bytes": 3 * 2**30}


@pytest.mark.parametrize(
    ("seconds_a_step", "printed"),
    [(0.0, [1, 1000, 2000]), (SECONDS_BETWEEN_LINES / 4, [1, 5, 9, 13]), (SECONDS_BETWEEN_LINES, [1, 2, 3, 4])],
)
def test_off_a_terminal_a_line_is_never_long_in_coming(
    seconds_a_step: float, printed: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenth of the steps, and a step whenever half a minute has passed."""
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    shown = Display(10_000, 0)
    for step in range(1, 2001 if not seconds_a_step else printed[-1] + 1):
        shown.show(cast(Any, SimpleNamespace(step=step, **STEP)))
        now[0] += seconds_a_step
    assert [int(line.split()[1].partition("/")[0]) for line in capsys.readouterr().err.splitlines()] == printed


def test_a_line_has_rate_norm_memory_and_where_it_is_known_utilisation() -> None:
    text = "loss 1.0000  12,345 tokens/s{}  lr 3.00e-04  gradient norm 0.918  3.00 GiB"
    assert step_text(cast(Any, SimpleNamespace(**STEP))) == text.format("")
    assert step_text(cast(Any, SimpleNamespace(**{**STEP, "mfu": 0.4123}))) == text.format("  MFU 41.2 %")
