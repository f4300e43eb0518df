"""Kernels that became faster after a device's steps were profiled: the part of the measured time that their kinds take.

A row names a kernel, the runs that it was profiled in, and the microseconds of its launches in one call before and after the change. A
kind's factor is the time that all its kernels would take in these runs over the time that they took. Its basis is `measured` if the present
kernels were measured; it is `modelled` if the row comes from an experiment, or from another operation's rate.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megaplan.columns import Basis
from megaplan.diagnostics import refuse
from megaplan.measured.kernels import family_of
from megaplan.spec.read import read_text

FORM = '{"kernels": [{"kernel": NAME, "runs": [NAME, …], "us": [BEFORE, AFTER], "basis": "measured" or "modelled", "source": …}]}'


def changed_kernels(path: str) -> list[dict[str, Any]]:
    """The rows of a file.

    Raises:
        MegaplanError: MP487, the file is no such document.
    """
    try:
        rows: list[dict[str, Any]] = json.loads(read_text(path))["kernels"]
        for row in rows:
            before, after = row["us"]
            if not (row["kernel"] and row["runs"] and row["source"] and before > 0 and after > 0):
                raise ValueError(str(row))
            Basis(row["basis"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise refuse("MP487", f"{path} has no list of changed kernels: {error}", FORM) from None
    return rows


def changes_of(rows: Iterable[Mapping[str, Any]], runs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Factor, basis and sources of each kind.

    Args:
        rows: Changed kernels.
        runs: Profiled runs with `run` and `gpu.by_kernel`.
    """
    known = list(rows)
    times: dict[str, list[float]] = {}
    sources: dict[str, dict[str, str]] = {}
    for run in runs:
        own = {row["kernel"]: row for row in known if run["run"] in row["runs"]}
        found: dict[tuple[str, ...], list[float]] = {}
        touched: dict[tuple[str, ...], dict[str, str]] = {}
        for name, _, milliseconds in run["gpu"]["by_kernel"]:
            family, row = family_of(name), own.get(name)
            if family is not None:
                total = found.setdefault(family.kinds, [0.0, 0.0])
                total[0] += milliseconds
                total[1] += milliseconds * (row["us"][1] / row["us"][0] if row else 1.0)
                if row:
                    touched.setdefault(family.kinds, {})[row["source"]] = row["basis"]
        for kinds, texts in touched.items():
            for kind in kinds:
                total = times.setdefault(kind, [0.0, 0.0])
                total[0], total[1] = total[0] + found[kinds][0], total[1] + found[kinds][1]
                sources.setdefault(kind, {}).update(texts)
    return {
        kind: {
            "factor": round(after / before, 4),
            "basis": str(Basis.MODELLED if Basis.MODELLED in sources[kind].values() else Basis.MEASURED),
            "sources": sorted(sources[kind]),
        }
        for kind, (before, after) in sorted(times.items())
    }
