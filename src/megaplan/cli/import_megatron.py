"""`megaplan import megatron`: launch arguments of Megatron-LM as a spec file."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from megaplan.cli.files import STDOUT, write_spec
from megaplan.cli.options import Overrides
from megaplan.diagnostics import refuse
from megaplan.terminal import output

if TYPE_CHECKING:
    from megaplan.importers.megatron.recording.rows import Recording


def import_megatron(
    launch: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE [-- ARGS]",
            help="Launch script, YAML of arguments, training log or Megatron-Bridge configuration, - for stdin; then arguments that "
            "follow its own. Without a file: arguments alone. With --record: a command, as -- bash launch.sh ARGS.",
        ),
    ],
    *,
    target: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file; - for stdout.")] = STDOUT,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs of the job; replaces the number in the file.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Environment variable for the script; repeatable.")
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Run the command in a temporary folder, with a stub for every launcher, and read the arguments of the launch."
        ),
    ] = False,
    number: Annotated[int | None, typer.Option("--launch", metavar="N", min=1, help="Which of several launches.")] = None,
    unconfined: Annotated[
        bool,
        typer.Option(
            "--unconfined", help="With --record: run the command without the kernel's sandbox (Landlock, seccomp), which some systems lack."
        ),
    ] = False,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="ARG", help="Leave out an argument of the launch; repeatable.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse every argument that the importer does not know.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    overrides: Overrides = None,
) -> int:
    """Convert a Megatron launch to a spec. Arguments that decide a tensor and that a spec cannot express are errors."""
    from megaplan.importers.megatron.arguments import name_of  # noqa: PLC0415  (help needs no model)
    from megaplan.importers.megatron.spec import import_megatron as read_launch  # noqa: PLC0415
    from megaplan.importers.megatron.spec import import_recording  # noqa: PLC0415
    from megaplan.importers.structure import Policy  # noqa: PLC0415
    from megaplan.spec.read import display_name, read_text  # noqa: PLC0415

    policy = Policy(strict=strict, ignored=frozenset(name_of(each) for each in ignore or ()))
    alone = launch[0].startswith("--")
    variables = dict(_variable(each) for each in env or ())
    if record:
        name = next((word for word in launch if os.path.isfile(word)), launch[0])
        recording = _recorded(launch, variables, gpus, unconfined=unconfined)
        imported = import_recording(recording, name, overrides or (), gpus, number, policy)
    else:
        name, text = ("arguments", "") if alone else (display_name(launch[0]), read_text(launch[0]))
        words = launch if alone else launch[1:]
        imported = read_launch(text, name, overrides or (), gpus, environment=variables, argv=words, policy=policy, number=number)
    write_spec(target, imported, f"Imported from {name}, launch arguments of Megatron-LM.", force=force)
    return 0


def _recorded(command: list[str], variables: dict[str, str], gpus: int | None, *, unconfined: bool) -> Recording:
    """Print which script is run and how, then run it.

    Raises:
        MegaplanError: MP924, this system cannot confine a script, or has no bash.
    """
    from megaplan.importers.megatron.recording.confine import missing  # noqa: PLC0415  (only to record)
    from megaplan.importers.megatron.recording.record import announcement, kept_variables, record  # noqa: PLC0415

    lacks = missing()
    again = shlex.join(["megaplan", "import", "megatron", "--record", "--unconfined", "--", *command])
    if lacks and not unconfined:
        raise refuse("MP924", "this system has no " + ", and no ".join(lacks), again)
    environment = {**kept_variables(os.environ), **variables}
    withheld = sorted(set(os.environ) - set(environment))
    output.note(announcement(command, withheld, confined=not (lacks or unconfined)))
    try:
        return record(command, environment, gpus_per_node=min(gpus or 8, 8), confined=not (lacks or unconfined))
    except FileNotFoundError as error:
        raise refuse("MP924", str(error), "install bash") from None
    except OSError as error:
        raise refuse("MP924", error.strerror or str(error), again) from None


def _variable(text: str) -> tuple[str, str]:
    """Name and value of `NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is not a NAME=VALUE, such as TP=8.", param_hint="--env")
    return name, value
