"""What this runtime can build: everything else of a plan is refused before the first process group exists."""

from __future__ import annotations

from megaplan.errors import MegaplanError, Severity
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses


def refuse_unbuilt(spec: Spec) -> None:
    """Refuse a spec that megaplan can price and megarun cannot build, or would not run as the plan says.

    Raises:
        MegaplanError: MP790 for what is not built; MP602 and MP603 for dtypes that torch would not keep.
    """
    found = megarun_refuses(spec, severity=Severity.ERROR)
    if found:
        raise MegaplanError(list(found))
