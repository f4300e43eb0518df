"""The generated page `docs/reference/recipes-fit.md`, from the rows that `benchmarks/recipes_fit.py --page` last judged."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bridge_recipes.document import parts_of
from bridge_recipes.rows import Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/recipes-fit.md"
RESULT = ROOT / "benchmarks/results/recipes_fit.json"
CAUSES = Path(__file__).with_name("causes.json")
GIB = 2**30
INTRODUCTION = """# Published recipes: does the estimate let them fit?

`make recipes-fit FILE=…` writes this page. Megatron-Bridge publishes performance recipes, complete configurations of runs on named
devices. A recipe that ran fits its device; an estimate that does not fit is a false out-of-memory. Each of the {count} recipes in
the data is imported as a user would: `megaplan import megatron` reads its configuration, with the GPUs and the device of its name, and the
estimate of the resulting spec, for Megatron-Core, is compared with the device's memory. A recipe states its model by name, so the
architectures come from `benchmarks/bridge_recipes/architectures.json`.

**{fit} of {judged} recipes fit ({share:.1f} %); {missing} of {count} ({missing_share:.1f} %) cannot be expressed as a spec.**
{narrow} of those that fit, {narrow_share:.1f} % of all judged, fit narrowly: as `megaplan estimate` says, they would not if torch reserved
as much as it has at most in published runs. {invalid} more are refused by Megatron itself: their degrees do not divide the GPUs of their
name, and the launcher of these recipes changes neither. It does change lengths of texts, to the model's, so that no recipe is refused for
lengths that differ. The tightest recipes that fit have less free memory than any margin, which shows that the estimates are not simply low;
[another page](accuracy-megatron.md) has their errors against measurements. A published recipe is not proof that it ran.

Peaks include 5 % that the allocator reserves above what is allocated. CUDA graphs of layers add the scratch of the largest layer, since
their pool shares nothing with what runs outside; the memory that the driver keeps for each graph is not counted.
"""


def text(rows: Sequence[Row]) -> str:
    """The whole page."""
    verdicts = Counter(row.verdict for row in rows)
    judged = verdicts["fit"] + verdicts["not_fit"]
    figures = {
        "count": len(rows),
        "fit": verdicts["fit"],
        "judged": judged,
        "narrow": sum(row.narrow for row in rows),
        "narrow_share": 100 * sum(row.narrow for row in rows) / judged if judged else 0.0,
        "share": 100 * verdicts["fit"] / judged if judged else 0.0,
        "missing": verdicts["not_expressed"],
        "invalid": verdicts["invalid"],
        "missing_share": 100 * verdicts["not_expressed"] / len(rows) if rows else 0.0,
    }
    parts = [INTRODUCTION.format_map(figures), _by_precision(rows), _not_fit(rows), _not_expressed(rows), _invalid(rows), _all(rows)]
    return "\n".join(parts)


def _by_precision(rows: Sequence[Row]) -> str:
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(parts_of(row.recipe)["precision"], Counter())[row.verdict] += 1
    lines = [f"| {name} | {one['fit']} | {one['not_fit']} | {one['not_expressed']} | {one['invalid']} |" for name, one in found.items()]
    return _table("## By precision", "Precision, Fit, Do not fit, Not expressed, Invalid", lines)


def _not_fit(rows: Sequence[Row]) -> str:
    causes = json.loads(CAUSES.read_text(encoding="utf-8"))
    some = [row for row in rows if row.verdict == "not_fit"]
    lines = [
        f"| {row.recipe} | {_gib(row.peak)} | {_gib(row.usable)} | {row.reason} | {causes.get(row.recipe, 'not known')} |" for row in some
    ]
    return _table("## Do not fit by the estimate", "Recipe, Peak GiB, Usable GiB, Largest column, Suspected cause", lines)


def _not_expressed(rows: Sequence[Row]) -> str:
    return _table("## Not expressed", "Recipe, Why", _reasons(rows, "not_expressed"))


def _invalid(rows: Sequence[Row]) -> str:
    return _table("## Invalid", "Recipe, Why", _reasons(rows, "invalid"))


def _reasons(rows: Sequence[Row], verdict: str) -> list[str]:
    return [f"| {row.recipe} | {row.reason.replace('|', chr(92) + '|')} |" for row in rows if row.verdict == verdict]


def _all(rows: Sequence[Row]) -> str:
    some = sorted((row for row in rows if row.peak is not None and row.usable is not None), key=lambda row: -_share(row))
    lines = [f"| {row.recipe} | {_gib(row.peak)} | {_gib(row.usable)} | {100 * _share(row):.0f} | {_said(row)} |" for row in some]
    return _table("## All, fullest first", "Recipe, Peak GiB, Usable GiB, %, Estimate", lines)


def _said(row: Row) -> str:
    return "does not fit" if row.verdict == "not_fit" else "fits narrowly" if row.narrow else "fits"


def _share(row: Row) -> float:
    return (row.peak or 0) / (row.usable or 1)


def _gib(size: int | None) -> str:
    return f"{(size or 0) / GIB:.1f}"


def _table(title: str, names: str, lines: Sequence[str]) -> str:
    cells = names.split(", ")
    return "\n".join([title, "", f"| {' | '.join(cells)} |", "|---" * len(cells) + "|", *lines, ""])
