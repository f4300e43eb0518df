"""`megaplan schema`: the JSON Schema of specs and plans, for editors and other tools."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from megaplan.terminal import output


class SchemaDocument(StrEnum):
    """Documents that have a schema."""

    SPEC = "spec"
    PLAN = "plan"


def schema(
    document: Annotated[SchemaDocument, typer.Argument(help="Document type.")],
    as_json: Annotated[bool, typer.Option("--json", help="No effect: a schema is always JSON.")] = False,  # noqa: ARG001
) -> int:
    """Print the JSON Schema of a spec or a plan."""
    if document is SchemaDocument.SPEC:
        from megaplan.spec.schema import spec_schema  # noqa: PLC0415

        output.write_json(spec_schema())
    else:
        from megaplan.plan.document import FORMAT, PlanDocument  # noqa: PLC0415
        from megaplan.spec.schema import DIALECT, schema_id  # noqa: PLC0415

        output.write_json({"$schema": DIALECT, "$id": schema_id(FORMAT), **PlanDocument.model_json_schema(mode="validation")})
    return 0
