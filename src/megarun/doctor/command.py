"""Implementation of `megarun doctor`."""

import warnings
from pathlib import Path

from megaplan.terminal import output
from megarun.doctor.findings import Finding, State, document, lines
from megarun.doctor.machine import devices, folders, memory
from megarun.doctor.plan import plan_findings
from megarun.doctor.versions import compilers, versions

PROBLEMS = 1


def examine(plan: str | None, *, out: Path | None, as_json: bool) -> int:
    """Check this machine, and a plan's requirements, and print the findings.

    Returns:
        0 without a problem, else 1.

    Raises:
        MegaplanError: The plan cannot be read.
    """
    warnings.simplefilter("ignore")  # warnings of torch and triton about their own internals
    needs = list(plan_findings(plan)) if plan is not None else []  # before CUDA starts: it forks
    found: list[Finding] = [*versions(), *compilers(), *devices(), *memory(), *folders(out), *needs]
    if as_json:
        output.write_json(document(found))
    else:
        output.write("".join(f"{line}\n" for line in lines(found)))
    return PROBLEMS if any(each.state is State.PROBLEM for each in found) else 0
