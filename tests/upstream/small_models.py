"""Write tests/megaplan/importers/small_models.json: two random small configs a model type, each with transformers' number of parameters."""

from __future__ import annotations

import json
from pathlib import Path

from hf_configs import CONFIGS, random_config
from test_imports import built

TARGET = Path(__file__).parents[1] / "megaplan/importers/small_models.json"
COUNT = 2


def main() -> None:
    """Write the file, a line a model."""
    made = {name: [(config, built(config)[1]) for config in (random_config(name, seed) for seed in range(COUNT))] for name in CONFIGS}
    lines = [f" {json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for name, rows in made.items()]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
