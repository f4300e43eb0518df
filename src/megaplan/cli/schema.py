"""`megaplan schema`: the JSON Schema of specs and plans, for editors and other tools."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from megaplan.terminal import output


class SchemaDocument(StrEnum):
    """Documents that have a schema."""

    SPEC = "spec"
    PLAN = "plan"
    RUN = "run"
    RL = "rl"


def schema(
    document: Annotated[SchemaDocument, typer.Argument(help="Document type.")],
    as_json: Annotated[bool, typer.Option("--json", help="No effect: a schema is always JSON.")] = False,  # noqa: ARG001
) -> int:
    """Print the JSON Schema of a spec, of a plan, or of what `megaplan run --json` or `megaplan rl --json` prints."""
    if document is SchemaDocument.RUN:
        from megaplan.goodput import values  # noqa: PLC0415
        from megaplan.goodput.estimate import FORMAT as RUN_FORMAT  # noqa: PLC0415

        output.write_json(_values_schema("run", values.RunEstimate, RUN_FORMAT))
    elif document is SchemaDocument.RL:
        from megaplan.post_training.estimate import FORMAT as RL_FORMAT  # noqa: PLC0415
        from megaplan.post_training.values import RlEstimate  # noqa: PLC0415

        output.write_json(_values_schema("rl", RlEstimate, RL_FORMAT))
    elif document is SchemaDocument.SPEC:
        from megaplan.spec.schema import spec_schema  # noqa: PLC0415

        output.write_json(spec_schema())
    else:
        from megaplan.plan.document import FORMAT, PlanDocument  # noqa: PLC0415
        from megaplan.spec.schema import DIALECT, schema_id  # noqa: PLC0415

        output.write_json({"$schema": DIALECT, "$id": schema_id(FORMAT), **PlanDocument.model_json_schema(mode="validation")})
    return 0


def _values_schema(command: str, root: type, document_format: str) -> dict[str, Any]:
    """The schema of the values that a command prints, with the descriptions of their docstrings."""
    import sys  # noqa: PLC0415
    from dataclasses import is_dataclass  # noqa: PLC0415

    from pydantic import TypeAdapter  # noqa: PLC0415

    from megaplan.spec.schema import DIALECT, attribute_help, schema_id  # noqa: PLC0415

    schema = TypeAdapter(root).json_schema(mode="serialization")
    names = vars(sys.modules[root.__module__])
    for name, definition in {root.__name__: schema, **schema["$defs"]}.items():
        made = names[name]
        if is_dataclass(made):
            definition["description"], keys = attribute_help(made.__doc__ or "")
            for key, prop in definition["properties"].items():
                prop["description"] = keys[key]
                prop.pop("title", None)
    schema["properties"]["format"]["const"] = document_format
    return {"$schema": DIALECT, "$id": schema_id(document_format), **schema, "title": f"megaplan {command}"}
