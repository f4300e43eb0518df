"""Megatron-Core's own measured runs, as the tests of several folders read them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from accuracy_megatron.launches import stage_of_launch

from megaplan.hosts.megatron.run import MegatronStage

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "megaplan/hosts/megatron/goldens.json").read_text(encoding="utf-8"))[
    "rows"
]
STATED = [row for row in ROWS if row["gpus"] and row["padded_vocab_size"]]
"""Goldens whose GPUs and padded vocabulary are known."""


def stage_of(row: dict[str, Any], **changes: Any) -> MegatronStage:
    """The first stage of a row's launch, with changed arguments."""
    if not changes:
        return unchanged(ROWS.index(row))
    return stage_of_launch({**row["arguments"], **changes}, *known(row), environment=row["environment"], month=row["measured"][:7])


@cache
def unchanged(index: int) -> MegatronStage:
    """The stage of the row with this index as it was launched."""
    row = ROWS[index]
    return stage_of_launch(row["arguments"], *known(row), environment=row["environment"], month=row["measured"][:7])


def known(row: dict[str, Any]) -> tuple[int, int, str]:
    """GPUs, padded vocabulary and platform of a row's launch."""
    return row["gpus"], row["padded_vocab_size"], row["platform"]
