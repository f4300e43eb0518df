"""MP480: what the argument parser refuses, in the parser's words without those of the library below it."""

from __future__ import annotations

import pytest
import typer

from megaplan.terminal.usage import usage_error


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("search", "plans/tiny-hybrid-pp2.yaml", "--devices", "4", "--objective", "speed"), "--objective"),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.json", "--format", "html"), "--format"),
        (("export", "plans/tiny-hybrid.json", "--to", "nowhere"), "--to"),
    ],
)
def test_a_value_that_an_option_does_not_take(megaplan, words, option):
    """The message names the option and the value, and no exception type."""
    ran = megaplan(*words)
    assert (ran.status, ran.out) == (2, "")
    (line,) = [line for line in ran.err.splitlines() if option in line]
    assert line.strip().startswith(f"Invalid value for '{option}': '{words[-1]}' is not one of '")


def test_the_prefix_of_pydantic_is_removed():
    """The prefix is removed whether the installed typer adds it or not."""
    found = usage_error(typer.BadParameter("Value error, 'foo' is not one of 'a', 'b'."), "megaplan")
    assert found is not None
    assert found.detail == "Invalid value: 'foo' is not one of 'a', 'b'."
    assert usage_error(ValueError("Value error, x"), "megaplan") is None
