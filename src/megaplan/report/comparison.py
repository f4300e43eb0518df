"""The data of a page that compares two plans, from the document of `megaplan diff --json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaplan.layout.ranks import runs_label
from megaplan.report.document import FORMAT, MAX_RANKS

if TYPE_CHECKING:
    from megaplan.api.plans import Diff


def comparison_report(found: Diff, before: str, after: str) -> dict[str, Any]:
    """The data of the page.

    Args:
        found: The difference.
        before: Name of the current plan's file.
        after: Name of the proposed plan's file.

    Returns:
        Plain values: `diff` has the document's keys, and a rank's change has the text and the first rank instead of the list of ranks.
        `left_out` counts changes of ranks that are not shown (the smallest peaks).
    """
    document = found.to_dict()
    changed = sorted(zip(found.changes.ranks, document["ranks"], strict=True), key=lambda each: -_peak(each[1]))[:MAX_RANKS]
    ranks = [{"label": runs_label(rank.ranks).capitalize(), "first": rank.ranks[0][0], **shown} for rank, shown in changed]
    for each in ranks:
        del each["ranks"], each["columns"]
    return {
        "format": FORMAT,
        "kind": "comparison",
        "name": " → ".join(dict.fromkeys(found.changes.names)),
        "files": {"before": before, "after": after},
        "left_out": {"ranks": len(document["ranks"]) - len(ranks)},
        "diff": {**document, "ranks": sorted(ranks, key=lambda each: each["first"])},
    }


def _peak(rank: dict[str, Any]) -> int:
    return max(int(side["peak_bytes"]) for side in (rank["before"], rank["after"]) if side is not None)
