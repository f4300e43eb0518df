"""Refuses plans that the runtime cannot build, before the first process group is created."""

from __future__ import annotations

from megaplan.errors import MegaplanError, Severity
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses


def refuse_unbuilt(spec: Spec) -> None:
    """Refuse a spec that megaplan can estimate and megarun cannot build, or cannot run as planned.

    Raises:
        MegaplanError: MP790 for unsupported settings; MP602 and MP603 for dtypes that torch does not support.
    """
    found = megarun_refuses(spec, severity=Severity.ERROR)
    if found:
        raise MegaplanError(list(found))
