"""`megaplan sign`: a signature of a plan, which `megaplan check --signer` verifies."""

from typing import Annotated

import typer

from megaplan.cli import completion
from megaplan.terminal import output


def sign(
    plans: Annotated[
        list[str], typer.Argument(metavar="PLAN...", help="Plans, or patterns like 'plans/*.json'.", autocompletion=completion.plans)
    ],
    *,
    key: Annotated[str, typer.Option("--key", metavar="FILE", help="The private key, Ed25519 in PEM: openssl genpkey -algorithm ed25519.")],
) -> int:
    """Sign PLAN with a private key; the signature is PLAN.sig. A plan whose digest does not hold is not signed."""
    from megaplan.cli.files import STDOUT, expanded, write_signature  # noqa: PLC0415
    from megaplan.diagnostics import refuse  # noqa: PLC0415
    from megaplan.errors import MegaplanError  # noqa: PLC0415
    from megaplan.plan import signature  # noqa: PLC0415
    from megaplan.plan.read import parse_plan  # noqa: PLC0415
    from megaplan.plan.text import MAX_PLAN_BYTES  # noqa: PLC0415
    from megaplan.spec.read import read_text  # noqa: PLC0415

    for plan in expanded(plans):
        if plan == STDOUT:
            raise refuse("MP480", "a signature belongs to a file, and - is standard input", f"megaplan sign plan.json --key {key}")
        text = read_text(plan, MAX_PLAN_BYTES)
        loaded = parse_plan(text, plan)
        if loaded.tampered:
            raise MegaplanError(loaded.tampered)
        target = plan + signature.ENDING
        write_signature(target, signature.sign(text, key))
        output.write(f"{target}: {loaded.plan.digests.plan}")
    return 0
