"""Write small_models.json and small_towers.json of tests/megaplan/importers: small configs with transformers' number of parameters."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hf_configs import CONFIGS, random_config
from hf_towers import MULTIMODAL, random_towers
from test_imports import built

FOLDER = Path(__file__).parents[1] / "megaplan/importers"
COUNT = 2


def main() -> None:
    """Write the files, a line a model."""
    _write("small_models.json", CONFIGS, random_config, COUNT)
    _write("small_towers.json", MULTIMODAL, random_towers, 1)


def _write(name: str, types: Iterable[str], draw: Callable[[str, int], dict[str, Any]], count: int) -> None:
    made = {kind: [(config, built(config)[1]) for config in (draw(kind, seed) for seed in range(count))] for kind in types}
    lines = [f" {json.dumps(kind)}: [\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for kind, rows in made.items()]
    (FOLDER / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
