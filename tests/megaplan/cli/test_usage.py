"""MP480: refusals of the argument parser, in its own words without the underlying library's."""

import json
import re

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


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("estimate", "plans/tiny-hybrid.yaml", "--tensor-model-parallel-size", "2"), "--set mesh.tp=2"),
        (("estimate", "plans/tiny-hybrid.yaml", "--pp=2"), "--set mesh.pp=2"),
        (("split", "plans/tiny-hybrid.yaml", "--moe-router-topk", "4", "--json"), "--set model.moe.top_k=4"),
        (("estimate", "plans/tiny-hybrid.yaml", "--fp8"), "--set 'precision.recipe={name: fp8_current}'"),
        (("estimate", "plans/tiny-hybrid.yaml", "--num-gpus", "4"), "--gpus 4"),
        (("estimate", "plans/tiny-hybrid.yaml", "--global-batch-size", "64"), "--global-batch 64"),
        (("estimate", "plans/tiny-hybrid.yaml", "--seq-length", "512"), "--seq 512"),
        (("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid.json", "--tp", "2"), "megaplan diff --help"),
        (("estimate", "plans/tiny-hybrid.yaml", "--foo", "2"), "megaplan estimate --help"),
        (("estimate", "plans/tiny-hybrid.yaml", "mesh.tp=2"), "--set mesh.tp=2"),
        (("estimate", "plans/tiny-hybrid.yaml", "--set", "mesh.tp", "2"), "--set mesh.tp=2"),
        (("estimate", "plans/tiny-hybrid.yaml", "--set", "mesh.tp=2", "mesh.pp=2"), "--set mesh.tp=2 --set mesh.pp=2"),
        (("estimate", "plans/tiny-hybrid.yaml", "other.yaml"), "megaplan estimate --help"),
        (("estimate", "plans/tiny-hybrid.yaml", "--set", "mesh.tp=2", "--rank", "one"), "megaplan estimate --help"),
        (("estimate", "plans/tiny-hybrid.yaml", "--compare", "mesh.pp=2", "mesh.tp=2"), "--set mesh.tp=2"),
        (("split", "plans/tiny-hybrid.yaml", "--global-batch-size", "64"), "megaplan split --help"),
        (("memory", "plans/tiny-hybrid.yaml", "--json"), "megaplan estimate plans/tiny-hybrid.yaml --json"),
    ],
)
def test_words_of_another_tool_are_hints_of_ours(megaplan, words, hint):
    ran = megaplan(*words)
    assert ran.status == 2
    hints = json.loads(ran.out)["diagnostics"][0]["hints"] if "--json" in words else re.findall("^hint: (.*)$", ran.err, re.MULTILINE)
    assert hints[0] == hint


def test_the_prefix_of_pydantic_is_removed():
    """The prefix is removed whether the installed typer adds it or not."""
    found = usage_error(typer.BadParameter("Value error, 'foo' is not one of 'a', 'b'."), "megaplan")
    assert found is not None
    assert found.detail == "Invalid value: 'foo' is not one of 'a', 'b'."
    assert usage_error(ValueError("Value error, x"), "megaplan") is None


SPEC = "plans/tiny-hybrid.yaml"


@pytest.mark.parametrize(
    ("words", "place", "hint"),
    [
        (("run", SPEC, "--price", "1_000"), "--price 1_000: run.price", "--price 1000"),
        (("run", SPEC, "--tokens", "many"), "--tokens many: run.tokens", "leave --tokens out"),
        (("run", SPEC, "--eval-every=0"), "--eval-every 0: run.eval_every", "leave --eval-every out"),
        (("report", SPEC, "--price", "-1"), "--price -1: run.price", "leave --price out"),
        (("run", SPEC, "--set", "run.price=1_000"), "--set run.price=1_000: run.price", "--set run.price=1000"),
        (("estimate", SPEC, "--compare", "mesh.tpp=2"), "--compare mesh.tpp=2", "--compare mesh.tp=2"),
        (("estimate", SPEC, "--compare", "tp"), "--compare tp", "--compare mesh.tp=8"),
    ],
)
def test_a_wrong_value_of_an_option_is_at_that_option(megaplan, words, place, hint):
    """A hint with `--set` would not end the error: the option's value counts."""
    ran = megaplan(*words)
    assert (ran.status, ran.out) == (2, "")
    assert f"--> {place}\n" in ran.err
    assert f"hint: {hint}\n" in ran.err
