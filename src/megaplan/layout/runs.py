"""Sets of ranks as half-open runs: `[[0, 4], [8, 12]]` for 0 to 3 and 8 to 11; any length takes a few bytes."""

from __future__ import annotations

from collections.abc import Sequence

RankRun = tuple[int, int]

_SHOWN = 2


def runs_of(ranks: Sequence[int]) -> tuple[RankRun, ...]:
    """Ascending ranks as runs."""
    runs: list[RankRun] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank:
            runs[-1] = (runs[-1][0], rank + 1)
        else:
            runs.append((rank, rank + 1))
    return tuple(runs)


def joined(runs: Sequence[RankRun]) -> tuple[RankRun, ...]:
    """The same ranks in as few runs as possible, ascending; no rank may be in two runs."""
    found: list[RankRun] = []
    for start, stop in sorted(runs):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def num_ranks(runs: Sequence[RankRun]) -> int:
    """Ranks in the runs."""
    return sum(stop - start for start, stop in runs)


def runs_label(runs: Sequence[RankRun]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 0-3, 8-11`; for many runs the first two, and the number of all ranks."""
    texts = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in runs]
    count = num_ranks(runs)
    if len(texts) > _SHOWN:
        return f"ranks {', '.join(texts[:_SHOWN])} … ({count})"
    return f"{'rank' if count == 1 else 'ranks'} {', '.join(texts)}"
