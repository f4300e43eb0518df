"""Megatron-Core's own measured runs, as the tests of several folders read them."""

import json
from pathlib import Path
from typing import Any

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "megaplan/hosts/megatron/goldens.json").read_text(encoding="utf-8"))[
    "rows"
]
STATED = [row for row in ROWS if row["gpus"] and row["padded_vocab_size"]]
"""Those whose GPUs and padded vocabulary are known."""
