"""Tables of generated pages."""

from collections.abc import Sequence


def markdown(head: Sequence[str], lines: Sequence[Sequence[object]], left: int = 1) -> str:
    """A table whose first `left` columns are text and the others numbers."""
    rule = ["---" if number < left else "---:" for number in range(len(head))]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (head, rule, *lines))
