"""A part of each file is for evaluation alone: disjoint from training, whatever else rows are made of."""

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaplan.errors import MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.checkpoint.compatible import check_compatible
from megarun.checkpoint.manifest import Manifest
from megarun.data.mix import TokenMix
from megarun.data.token_file import TokenFile
from megarun.job.job import Job
from megarun.job.run import Checkpoints, Run, SavedPlan
from megarun.training.prepare import hold_out, open_data, open_held_out

pytestmark = pytest.mark.runtime
LENGTH, NUM_WINDOWS = 3, 20


@pytest.fixture
def counting(token_file: Any) -> TokenFile:
    """Tokens 0 … 60: a row's tokens say which window it is, documents begin at every seventh."""
    return TokenFile(token_file([list(range(start, min(start + 7, 61))) for start in range(0, 61, 7)]))


@pytest.fixture
def planned(spec_with: Any, counting: TokenFile, tmp_path: Path) -> Run:
    """A run whose batch has two rows of that file."""
    spec = Spec.model_validate(spec_with({"model.vocab_size": 300, "batch": {"micro_batch_size": 2, "seq_length": LENGTH}}))
    inventory = build_inventory(spec)
    job = Job(spec, inventory, build_layout(spec, inventory, [(0, 5)]))
    return Run(job, counting, tmp_path / "run", 10, SavedPlan("{}", "sha256:a", "sha256:b"), Checkpoints())


@pytest.mark.parametrize(("fraction", "num_held_out"), [("0.05", 1), ("0.29", 5), ("0.3", 6), ("0.95", 19)])
def test_both_parts_are_the_file(counting: TokenFile, fraction: str, num_held_out: int) -> None:
    """The last ⌊F · W⌋ windows, the decimal number taken exactly; every window once an epoch on one side; no label on both."""
    training, held_out = counting.split(Fraction(Decimal(fraction)))
    kept = NUM_WINDOWS - num_held_out
    assert (training.num_windows(LENGTH), held_out.num_windows(LENGTH)) == (kept, num_held_out)
    for part, windows in ((training, range(kept)), (held_out, range(kept, NUM_WINDOWS))):
        for epoch in (0, 1):
            rows = part.rows(epoch, 7, len(windows), LENGTH)
            assert sorted(rows[:, 0].tolist()) == [window * LENGTH for window in windows]
    labels = [set(part.rows(0, 7, 40, LENGTH)[:, 1:].flatten().tolist()) for part in (training, held_out)]
    assert not labels[0] & labels[1]
    assert counting.num_windows(LENGTH) == NUM_WINDOWS


def test_documents_and_rows_are_of_the_same_windows(counting: TokenFile) -> None:
    """Packed rows: where a row's tokens are, their documents begin as in the whole file."""
    for part in counting.split(Fraction(1, 4)):
        rows, starts = part.rows(3, 1, 8, LENGTH), part.starts(3, 1, 8, LENGTH)
        for row, columns in zip(rows.tolist(), starts.tolist(), strict=True):
            assert columns == [max(token // 7 * 7 - row[0], 0) for token in row]


def test_a_mix_is_held_out_file_by_file(counting: TokenFile, token_file: Any) -> None:
    """The same part of each, in the same proportions."""
    other = TokenFile(token_file([list(range(100, 131))], name="other.tokens"))
    training, held_out = TokenMix([(counting, 6), (other, 3)]).split(Fraction(1, 5))
    rows = [set(part.rows(0, 2, 300, LENGTH)[:, 0].tolist()) for part in (training, held_out)]
    assert rows[0] == {*range(0, 48, LENGTH), *range(100, 124, LENGTH)}
    assert rows[1] == {*range(48, 60, LENGTH), *range(124, 130, LENGTH)}
    firsts = held_out.rows(0, 2, 60, LENGTH)[:, 0]
    assert (np.sort((firsts >= 100).reshape(-1, 3)) == [False, False, True]).all()
    assert held_out.num_windows(LENGTH) == 6


def test_a_run_evaluates_on_what_it_leaves_out(planned: Run) -> None:
    """All whole batches of it, and the number as a checkpoint keeps it."""
    run = hold_out(planned, "2.5e-1", 50, None)
    assert run.held_out is not None
    assert (run.source.num_windows(LENGTH), run.held_out.source.num_windows(LENGTH)) == (15, 5)
    assert (run.held_out.every, run.held_out.num_batches, run.validation_fraction) == (50, 2, "0.25")


@pytest.mark.parametrize(
    ("fraction", "num_batches", "code", "words"),
    [
        ("0", None, "MP628", "--validation-fraction 0"),
        ("1", None, "MP628", "--validation-fraction 1"),
        ("nan", None, "MP628", "--validation-fraction nan"),
        ("a tenth", None, "MP628", "--validation-fraction a tenth"),
        ("1e-999999999", None, "MP628", "--validation-fraction 1e-999999999"),
        ("0.04", None, "MP628", "20 rows of 3 tokens, of which --validation-fraction leaves 20 for training, 0 for evaluation"),
        ("0.05", None, "MP622", "--validation-fraction 0.05: 1 rows of 3 tokens; 1 batches of 2 rows were requested"),
        ("0.25", 3, "MP622", "--validation-fraction 0.25: 5 rows of 3 tokens; 3 batches of 2 rows were requested"),
    ],
)
def test_what_holds_nothing_out(planned: Run, fraction: str, num_batches: int | None, code: str, words: str) -> None:
    """One error, which says the number, or the rows."""
    with pytest.raises(MegaplanError) as error:
        hold_out(planned, fraction, 50, num_batches)
    (found,) = error.value.diagnostics
    assert found.code == code
    assert words in found.detail


def test_a_file_of_its_own_is_as_it_was(planned: Run, counting: TokenFile) -> None:
    """--eval-data reads all rows of its file."""
    found = open_held_out(counting.path, planned.job, 10, None)
    assert found.num_batches == NUM_WINDOWS // 2
    assert isinstance(open_data([str(counting.path)], planned.job.spec), TokenFile)


@pytest.mark.requirement("R-69")
@pytest.mark.parametrize(
    ("saved", "now", "hint"),
    [
        ("0.25", "0", "--validation-fraction 0.25"),
        ("0.25", "0.3", "--validation-fraction 0.25"),
        ("0", "0.3", "omit --validation-fraction"),
    ],
)
def test_a_resumed_run_has_the_same_rows(planned: Run, saved: str, now: str, hint: str) -> None:
    """Another fraction is another order of rows, and would train on held-out rows."""
    manifest = Manifest(2, 0, planned.job.global_batch, "sha256:a", "sha256:b", 1, "2.13.0", {}, validation_fraction=saved)
    check_compatible(Path("saved"), manifest, replace(planned, validation_fraction=saved), weights_only=False)
    run = replace(planned, validation_fraction=now)
    check_compatible(Path("saved"), manifest, run, weights_only=True)
    with pytest.raises(MegaplanError) as error:
        check_compatible(Path("saved"), manifest, run, weights_only=False)
    (found,) = error.value.diagnostics
    assert (found.code, found.hints[0]) == ("MP648", hint)
    assert found.detail == f"--validation-fraction = {now}, the checkpoint's = {saved}"
