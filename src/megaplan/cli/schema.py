"""`megaplan schema`: the JSON Schema of specs and plans, for editors and other tools."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from megaplan.cli import output

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Document(StrEnum):
    """What has a schema."""

    SPEC = "spec"
    PLAN = "plan"


def schema(
    document: Annotated[Document, typer.Argument(help="Which document.")],
    as_json: Annotated[bool, typer.Option("--json", help="Accepted for symmetry: a schema is JSON.")] = False,  # noqa: ARG001
) -> int:
    """Print the JSON Schema of a spec or a plan."""
    if document is Document.SPEC:
        from megaplan.spec.models import Spec as Model  # noqa: PLC0415
    else:
        from megaplan.plan.document import PlanDocument as Model  # type: ignore[assignment]  # noqa: PLC0415
    output.write_json({"$schema": DIALECT, **Model.model_json_schema(mode="validation")})
    return 0
