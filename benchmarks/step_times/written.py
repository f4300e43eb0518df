"""The form of `constants.json`. `python benchmarks/step_times/written.py` writes its constants without rows again, from their priors.

No fit moves a constant without rows, so that this needs neither rows nor the extra `fit`.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "src" / "megaplan" / "cost" / "step" / "constants.json"


def main() -> None:
    """Write every constant that is missing, or has its prior's value, as its prior."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from step_times.priors import priors  # noqa: PLC0415

    document = json.loads(FILE.read_text(encoding="utf-8"))
    known = document["constants"]
    for name, prior in priors().items():
        if known.get(name, {"basis": "modelled"})["basis"] == "modelled":
            value, spread = float(f"{prior.value:.4g}"), round(prior.spread, 3)
            known[name] = {"value": value, "spread": spread, "unit": prior.unit, "basis": "modelled", "source": prior.source}
    FILE.write_text(constants_text(document), encoding="utf-8")


def constants_text(document: dict[str, Any]) -> str:
    """JSON with one constant or combination a line."""
    listed = ",\n".join(f"    {json.dumps(name)}: {json.dumps(record)}" for name, record in document["constants"].items())
    tuples_text = ",\n".join(f"    {json.dumps(each)}" for each in document["tuples"])
    rest = {key: value for key, value in document.items() if key not in ("constants", "tuples")}
    head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rest.items())
    return f'{{\n{head},\n  "tuples": [\n{tuples_text}\n  ],\n  "constants": {{\n{listed}\n  }}\n}}\n'


if __name__ == "__main__":
    main()
