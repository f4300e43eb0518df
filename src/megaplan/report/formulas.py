"""The explanations of a page's numbers: the texts of `megaplan explain`."""

from megaplan.budget.formulas import FORMULAS
from megaplan.columns import Column
from megaplan.cost.step.formulas import FORMULAS as STEP_TERMS
from megaplan.hosts.kind import HostKind

Fields = dict[str, str]
"""Name of a field to its text, in display order."""


def column_formulas(host: HostKind) -> dict[str, Fields]:
    """Texts of every column, and of the memory outside torch; formulas of columns exist only for a host that megarun trains."""
    found = {"reserve": _column("reserve")}
    for column in Column:
        found[str(column)] = _column(column) if host.trained else {}
        found[str(column)][f"{host.name} keeps"] = host.holds[column]
    return found


def _column(name: str) -> Fields:
    formula = FORMULAS[name]
    return {
        "holds": formula.holds,
        "formula": formula.formula,
        "units": f"{formula.units}, {formula.basis}",
        "source": formula.source,
        "example": formula.example,
    }


def term_formulas() -> dict[str, Fields]:
    """Texts of the terms of the step-time model."""
    return {
        name: {"is": term.summary, "formula": term.formula, "units": term.unit, "source": term.source, "example": term.example}
        for name, term in STEP_TERMS.items()
    }
