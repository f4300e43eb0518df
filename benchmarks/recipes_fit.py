"""Published recipes of Megatron-Bridge that fit by the estimate: all of them ran, so each that does not is a false out-of-memory.

python benchmarks/recipes_fit.py FILE.json [--json OUT] [--page]

FILE.json maps names of recipes to their values by dotted key. OUT is `{"fit": N, "not_fit": [...], "not_expressed": [...],
"invalid": [...]}`; an entry has the recipe, its peak and usable bytes, and the largest column or why no spec says it. Invalid ones
are refused by Megatron itself. With --page the rows are kept in
`benchmarks/results/recipes_fit.json` and `docs/reference/recipes-fit.md` is written.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from bridge_recipes.page import PAGE, RESULT, text
from bridge_recipes.rows import judge, result


def main() -> int:
    """Judge a file of recipes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="recipes as JSON")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the counts and the entries")
    parser.add_argument("--page", action="store_true", help="write the page of the documentation")
    given = parser.parse_args()
    rows = [judge(name, recipe) for name, recipe in json.loads(given.file.read_text(encoding="utf-8")).items()]
    found = result(rows)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if given.page:
        lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
        RESULT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        PAGE.write_text(text(rows), encoding="utf-8")
    for entry in (*found["not_fit"], *found["not_expressed"], *found["invalid"]):
        print(f"{entry['recipe']}: {entry['reason']}")
    counts = ", ".join(f"{name.replace('_', ' ')} {len(found[name])}" for name in ("not_fit", "not_expressed", "invalid"))
    print(f"fit {found['fit']}, {counts} of {len(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
