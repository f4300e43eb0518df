"""`megaplan`: the commands; the only module that turns an exception into an exit status.

Exit status: 0 the answer is yes, 1 it is no (does not fit, differs), 2 an error, 3 a `--fail-on` condition holds, 130 interrupted,
141 the reader of a pipe has exited.
`run` catches every exception: an unexpected one is reported as a bug and exits 2, so a crash is never taken for "does not fit".
"""

import atexit
import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from megaplan.errors import MegaplanError
from megaplan.terminal import output
from megaplan.terminal.exit_status import ERROR, INTERRUPTED
from megaplan.terminal.run import exit_status_of, limited_processor_time, processor_seconds

_COMMANDS = (
    "estimate",
    "split",
    "search",
    "run",
    "rl",
    "costs",
    "show",
    "report",
    "diff",
    "check",
    "sign",
    "schedule",
    "devices",
    "calibrate",
    "project",
    "explain",
    "export",
    "schema",
    "new",
)
"""Command names in the order of the help; each is a function in the module of the same name."""
_FACTORS = {
    "split": 12,
    "search": 12,
    "calibrate": 12,
    "project": 12,
    "check": 12,
    "estimate": 3,
    "run": 3,
    "rl": 12,
    "report": 3,
    "export": 3,
}
"""Commands that compare many layouts or cuts may use more processor time than the others, by these factors."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from megaplan import __version__  # noqa: PLC0415
        from megaplan.terminal.versions import version_text  # noqa: PLC0415

        output.write(version_text("megaplan", __version__, ("pydantic", "numpy", "PyYAML", "typer")))
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Plan the training of hybrid language models: memory per GPU, and optimal pipeline stages."""


def _app(words: Sequence[str]) -> typer.Typer:
    """The parser: only the command that the first word names, or all commands for help and for unknown commands."""
    app = typer.Typer(
        name="megaplan",
        help="Plan the training of hybrid language models: memory per GPU, and optimal pipeline stages.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    named = words[:1] if words and words[0] in _COMMANDS else None
    helps = not words or bool({"--help", "-h"} & set(words))
    for name in named or _COMMANDS:
        epilog, panel = _help_of(name) if helps else (None, None)
        app.command(epilog=epilog, rich_help_panel=panel)(getattr(import_module(f"megaplan.cli.{name}"), name))
    if named is None:
        from megaplan.cli.import_hf import group  # noqa: PLC0415  (the daily command has a spec)
        from megaplan.hosts.registry import HOSTS  # noqa: PLC0415

        known = {command.name for command in group.registered_commands}
        for host in HOSTS.values():
            if host.import_ is not None and host.name not in known:
                group.command(host.name, epilog=_help_of(f"import {host.name}")[0])(host.import_.value)
        app.add_typer(group, rich_help_panel="Move")
    return app


def _help_of(name: str) -> tuple[str | None, str | None]:
    """Examples and group of a command, for help texts."""
    from megaplan.cli.examples import epilog_of, group_of  # noqa: PLC0415

    return epilog_of(name), group_of(name)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Command-line words without the program name; `sys.argv[1:]` if None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # the process ends with the command: nothing is to be searched for garbage at its end
        atexit.register(gc.freeze)

    def command() -> object:
        with limited_processor_time(_FACTORS.get(words[0] if words else "", 1) * processor_seconds()):
            return _app(words)(words, prog_name="megaplan", standalone_mode=False)

    return exit_status_of(command, lambda error: _failed(error, words))


def _failed(error: Exception, words: Sequence[str]) -> int:
    """The exit status after a refusal, a usage error of the argument parser, an abort, or a bug."""
    as_json = output.asks_json(words)
    from megaplan.cli import problems  # noqa: PLC0415  (only when something is wrong)
    from megaplan.terminal.limits import limit_reached  # noqa: PLC0415

    limit = limit_reached(error)
    if isinstance(error, MegaplanError) or limit is not None:
        found = [*(error.diagnostics if isinstance(error, MegaplanError) else ()), *((limit,) if limit is not None else ())]
        output.fail([problems.as_typed(each, words) for each in found], as_json=as_json)
        return ERROR
    from megaplan.terminal.usage import usage_error  # noqa: PLC0415

    if type(error).__name__ == "Abort":
        return INTERRUPTED
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is on stdout already
        return ERROR
    output.fail([usage_error(error, "megaplan", problems.settings_meant(error, words)) or problems.bug(error)], as_json=as_json)
    return ERROR
