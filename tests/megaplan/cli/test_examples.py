"""Help texts: every command has examples, and each is a valid command line."""

import shlex

import pytest
import typer
from typer.main import get_command

from megaplan.cli import examples as of_megaplan
from megaplan.cli.main import _app, run
from megarun.cli import examples as of_megarun
from megarun.cli import main as megarun

ALL = [text for examples in (of_megaplan.EXAMPLES, of_megarun.EXAMPLES) for texts in examples.values() for text in texts]


def commands(group: object, before: str = "") -> dict[str, object]:
    """Every command of a program by its words, groups opened."""
    found: dict[str, object] = {}
    for name, command in getattr(group, "commands", {}).items():
        words = f"{before}{name}"
        found |= commands(command, f"{words} ") if getattr(command, "commands", None) else {words: command}
    return found


def programs() -> dict[str, dict[str, object]]:
    megarun._mount_groups([])
    return {"megaplan": commands(get_command(_app(["--help"]))), "megarun": commands(get_command(megarun.app))}


def test_every_command_has_examples_in_its_help() -> None:
    for program, examples in (("megaplan", of_megaplan.EXAMPLES), ("megarun", of_megarun.EXAMPLES)):
        found = programs()[program]
        assert set(found) == set(examples)
        for name, command in found.items():
            assert getattr(command, "epilog", None), f"{program} {name}"
            assert getattr(command, "help", None), f"{program} {name}"


@pytest.mark.parametrize("text", ALL)
def test_an_example_is_a_command_line(text: str) -> None:
    words = shlex.split(text)
    words = words[: words.index(">")] if ">" in words else words
    if words[0] == "torchrun":
        words = ["megarun", *words[words.index("megarun") + 1 :]]
    found = programs()[words[0]]
    name = next(name for name in (" ".join(words[1:3]), words[1]) if name in found)
    command = found[name]
    command.make_context(name, words[1 + len(name.split()) :])  # type: ignore[attr-defined]


def test_commands_are_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(group in text for group in of_megaplan.GROUPS)
    grouped = [name for names in of_megaplan.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted({name.split()[0] for name in of_megaplan.EXAMPLES})
    assert isinstance(megarun.app, typer.Typer)
    assert megarun.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(group in text for group in (of_megarun.TRAIN, of_megarun.MACHINE, of_megarun.FILES))
