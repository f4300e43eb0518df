"""Rows of hashed n-grams: a function of the token and the preceding ones."""

import pytest
import torch
from torch import Tensor

from megakernels import ngram_rows

MODULUS = 2**31 - 1
TABLES, ROWS, ORDER = 5, 103, 4


def before(tokens: Tensor) -> Tensor:
    """The tokens 1 to ORDER - 1 places before each, -1 before the row's first."""
    return torch.stack([torch.nn.functional.pad(tokens, (places, 0), value=-1)[:, : tokens.shape[1]] for places in range(1, ORDER)], 1)


def exact_rows(tokens: list[int], position: int) -> list[int]:
    """One position, table by table, in Python's integers."""
    found, first = [], 0
    for table in range(TABLES):
        size = ROWS // TABLES + (table < ROWS % TABLES)
        multiplier = 1 + ((table + 1) * 0x9E3779B97F4A7C15 % 2**64 >> 33) % (MODULUS - 1)
        order, value = 2 + table % (ORDER - 1), 0
        for index in range(position - order + 1, position + 1):
            value = (value * multiplier + (tokens[index] if index >= 0 else -1) + 1) % MODULUS
        found.append(first + value % size)
        first += size
    return found


def test_rows_are_the_hashes_of_their_ngrams() -> None:
    tokens = torch.randint(0, 2**31, (2, 9), generator=torch.Generator().manual_seed(3))
    rows = ngram_rows(tokens, before(tokens), TABLES, ROWS)
    assert rows.tolist() == [[exact_rows(row, position) for position in range(9)] for row in tokens.tolist()]
    assert int(rows.max()) < ROWS


def test_the_operation_check_of_torch_passes() -> None:
    tokens = torch.arange(12).view(2, 6)
    arguments = (tokens, before(tokens), TABLES, ROWS)
    assert set(torch.library.opcheck(torch.ops.megakernels.ngram_rows.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("num_tables", "num_rows", "num_before"), [(0, 5, 3), (6, 5, 3), (2, 5, 0)])
def test_numbers_that_do_not_fit_are_refused(num_tables: int, num_rows: int, num_before: int) -> None:
    with pytest.raises(ValueError, match="ngram_rows"):
        ngram_rows(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, num_before, 8, dtype=torch.int64), num_tables, num_rows)
