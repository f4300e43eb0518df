"""Rows of several files: exact proportions, a function of a row's number alone, and every window of a file once an epoch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaplan.errors import MegaplanError
from megaplan.spec.models import Spec
from megarun.data.mix import TokenMix
from megarun.data.token_file import TokenFile
from megarun.training.prepare import open_data

pytestmark = pytest.mark.runtime


@pytest.fixture
def files(token_file: Any) -> list[TokenFile]:
    """Windows of three tokens: 20 of 1, 8 of 2, 12 of 3, documents of one window each."""
    return [TokenFile(token_file([[value] * 3] * count + [[value]], name=f"{value}.tokens")) for value, count in ((1, 20), (2, 8), (3, 12))]


def test_every_block_has_each_file_s_share(files: list[TokenFile]) -> None:
    """4 : 2 : 2 is blocks of four rows, in orders that differ."""
    mix = TokenMix(list(zip(files, (4, 2, 2), strict=True)))
    owners = mix.rows(0, 7, 400, 3)[:, 0].reshape(-1, 4)
    assert (np.sort(owners, axis=1) == [1, 1, 2, 3]).all()
    assert len({tuple(block) for block in owners.tolist()}) > 6


def test_a_row_is_a_function_of_its_number(files: list[TokenFile]) -> None:
    """However training is divided into batches, documents included."""
    mix = TokenMix([(files[0], 3), (files[1], 2)])
    whole, starts = mix.rows(0, 5, 60, 2), mix.starts(0, 5, 60, 2)
    for step in (3, 0, 4, 1, 2):
        assert (mix.rows(step, 5, 12, 2) == whole[12 * step : 12 * step + 12]).all()
        assert (mix.starts(step, 5, 12, 2) == starts[12 * step : 12 * step + 12]).all()


def test_each_file_has_its_own_epochs(token_file: Any) -> None:
    """The first 15 and 5 rows of a mix of 3 : 1 are every window of both files once; then the small one begins again."""
    counting = [list(range(start, start + count)) for start, count in ((0, 31), (100, 11))]
    files = [TokenFile(token_file([numbers], name=f"{numbers[0]}.tokens")) for numbers in counting]
    mix = TokenMix([(files[0], 3), (files[1], 1)])
    assert mix.num_windows(2) == 20
    first = mix.rows(0, 1, 40, 2)[:, 0].tolist()
    assert sorted(first[:20]) == [*range(0, 30, 2), *range(100, 110, 2)]
    assert sorted(value for value in first[20:] if value >= 100) == [*range(100, 110, 2)]


def test_the_command_line_names_a_mix(files: list[TokenFile], spec_with: Any, tmp_path: Path) -> None:
    """One file alone is itself, also if its name ends like a weight; several need weights."""
    spec = Spec.model_validate(spec_with({"model.vocab_size": 300, "batch.seq_length": 3}))
    names = [str(file.path) for file in files]
    assert isinstance(open_data(names[:1], spec), TokenFile)
    odd = tmp_path / "odd=3"
    odd.write_bytes(files[0].path.read_bytes())
    assert isinstance(open_data([str(odd)], spec), TokenFile)
    mix = open_data([f"{names[0]}=3", f"{names[1]}=1"], spec)
    assert mix.rows(0, 0, 4, 3)[:, 0].sum() == 3 * 1 + 2


@pytest.mark.parametrize(
    ("weights", "words"),
    [(("=1", ""), "without a weight"), (("=0", "=1"), "at least 1"), (("=1", "=1000"), "1,001"), (("=1", "=2", "=3"), "given twice")],
)
def test_what_is_not_a_mix(weights: tuple[str, ...], words: str, files: list[TokenFile], spec_with: Any) -> None:
    """One error each, which says which file or number."""
    spec = Spec.model_validate(spec_with({"model.vocab_size": 300, "batch.seq_length": 3}))
    names = [str(files[0].path), str(files[1].path), str(files[0].path)]
    with pytest.raises(MegaplanError) as error:
        open_data([name + weight for name, weight in zip(names, weights, strict=False)], spec)
    (found,) = error.value.diagnostics
    assert found.code == "MP623"
    assert words in found.detail
