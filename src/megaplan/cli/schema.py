"""`megaplan schema`: the JSON Schema of specs and plans, for editors and other tools."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from megaplan.terminal import output


class SchemaDocument(StrEnum):
    """Documents that have a schema."""

    SPEC = "spec"
    PLAN = "plan"
    RUN = "run"


def schema(
    document: Annotated[SchemaDocument, typer.Argument(help="Document type.")],
    as_json: Annotated[bool, typer.Option("--json", help="No effect: a schema is always JSON.")] = False,  # noqa: ARG001
) -> int:
    """Print the JSON Schema of a spec, of a plan, or of what `megaplan run --json` prints."""
    if document is SchemaDocument.RUN:
        output.write_json(_run_schema())
    elif document is SchemaDocument.SPEC:
        from megaplan.spec.schema import spec_schema  # noqa: PLC0415

        output.write_json(spec_schema())
    else:
        from megaplan.plan.document import FORMAT, PlanDocument  # noqa: PLC0415
        from megaplan.spec.schema import DIALECT, schema_id  # noqa: PLC0415

        output.write_json({"$schema": DIALECT, "$id": schema_id(FORMAT), **PlanDocument.model_json_schema(mode="validation")})
    return 0


def _run_schema() -> dict[str, Any]:
    """The schema of a whole run, with the descriptions of its values' docstrings."""
    from dataclasses import is_dataclass  # noqa: PLC0415

    from pydantic import TypeAdapter  # noqa: PLC0415

    from megaplan.goodput import values  # noqa: PLC0415
    from megaplan.goodput.estimate import FORMAT  # noqa: PLC0415
    from megaplan.spec.schema import DIALECT, attribute_help, schema_id  # noqa: PLC0415

    schema = TypeAdapter(values.RunEstimate).json_schema(mode="serialization")
    parts = {"RunEstimate": schema, **schema["$defs"]}
    for name, definition in parts.items():
        made = getattr(values, name)
        if is_dataclass(made):
            definition["description"], keys = attribute_help(made.__doc__ or "")
            for key, prop in definition["properties"].items():
                prop["description"] = keys[key]
                prop.pop("title", None)
    schema["properties"]["format"]["const"] = FORMAT
    return {"$schema": DIALECT, "$id": schema_id(FORMAT), **schema, "title": "megaplan run"}
