"""The pages of diagnostic codes: every code that is raised has one, and their examples are what the tools read."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from doc_commands import ROOT

from megaplan.cli import main as planner
from megaplan.cli.error_pages import VALUES, filled
from megaplan.cli.topics import topic_lines
from megaplan.diagnostics import codes, page_text, summary_of
from megaplan.spec.fields import all_keys

SOURCES = (ROOT / "src", ROOT / "kernels")
SECTIONS = ["Why", "Fix", "Example"]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
WRONG = re.compile(r"#.*\bwrong\b")
PLACES = ["errors/MP301.md", "errors/README.md", "guides/data.md"]
KEYS = {key for path in all_keys() for key in path}


def raised() -> set[str]:
    """Every code that is a string of the sources."""
    found = set()
    for path in [path for source in SOURCES for path in source.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"MP\d{3}", node.value):
                found.add(node.value)
    return found


@pytest.mark.skipif(not SOURCES[0].is_dir(), reason="needs the sources")
def test_every_code_that_is_raised_has_a_page_and_every_page_a_code_that_is_raised() -> None:
    assert raised() == set(codes())


@pytest.mark.skipif(not SOURCES[0].is_dir(), reason="needs the sources")
def test_the_index_is_up_to_date() -> None:
    found = subprocess.run([sys.executable, str(ROOT / "scripts/errors_page.py"), "--check"], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("code", codes())
def test_a_page_has_a_title_and_the_sections(code: str) -> None:
    """The title is the code and its summary; a lead paragraph, then why, fix and example, each of whole sentences."""
    text = page_text(code)
    title, _, body = text.partition("\n")
    assert re.fullmatch(r"MP[1-9]\d\d", code)
    assert title == f"# {code}: {summary_of(code)}"
    assert summary_of(code) == summary_of(code).strip(" .")
    lead, *sections = re.split(r"^## (.*)\n", body, flags=re.MULTILINE)
    assert sections[::2] == SECTIONS
    for paragraphs in (lead, sections[1], sections[3]):
        for paragraph in re.split(r"\n\n+", filled(paragraphs).strip()):
            assert paragraph.strip().endswith((".", ".)", ":")), paragraph
    assert FENCE.findall(text)
    assert FENCE.sub("", sections[5]).strip() == ""


@pytest.mark.parametrize("code", codes())
def test_a_page_is_printed_whole(code: str) -> None:
    """Every word of the page, without marks of Markdown, in lines of 80 columns where it is text."""
    printed = [line for line, _ in topic_lines(code)]
    text = re.sub(r"^(```.*|#+ )", "", filled(page_text(code)), flags=re.MULTILINE)
    assert " ".join(printed).split() == text.split()
    assert all(len(line) <= 80 for line in printed[1:] if not line.startswith("  "))
    assert not any("{{" in line for line in printed)


def test_every_placeholder_is_used_and_has_a_value() -> None:
    """A value that no page names is removed."""
    used = {name for code in codes() for name in re.findall(r"\{\{(\w+)\}\}", page_text(code))}
    assert used == set(VALUES)


def test_letters_and_limits_are_those_of_the_registries() -> None:
    from megaplan.families.registry import FAMILIES  # noqa: PLC0415  (what the page must name)

    text = filled(page_text("MP301"))
    assert all(f"{letter} ({family.title})" in text for letter, family in FAMILIES.items())
    refused = filled(page_text("MP720"))
    assert re.findall(r"^- (\w): ", refused, re.MULTILINE) == [letter for letter, family in FAMILIES.items() if family.full_refused]


@pytest.mark.skipif(not SOURCES[0].is_dir(), reason="needs the sources")
def test_the_site_fills_placeholders() -> None:
    """The hook of mkdocs does; pages of other folders keep their text in braces."""
    found = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts/docs_site.py")
    assert found is not None
    assert found.loader is not None
    hook = importlib.util.module_from_spec(found)
    found.loader.exec_module(hook)
    shown = {place: hook.on_page_markdown("{{letters}}", page=SimpleNamespace(file=SimpleNamespace(src_uri=place))) for place in PLACES}
    assert shown == dict(zip(PLACES, [filled("{{letters}}"), "{{letters}}", "{{letters}}"], strict=True))


def lines_of(*languages: str) -> Iterator[Any]:
    """(code, line) of every line of examples in these languages that is not marked as wrong."""
    for code in codes():
        for language, text in FENCE.findall(filled(page_text(code))):
            if language in languages:
                yield from (pytest.param(code, line, id=f"{code}: {line}") for line in text.splitlines() if not WRONG.search(line))


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inside in value.items():
            yield str(key)
            yield from keys_of(inside)


@pytest.mark.parametrize(("code", "line"), [*lines_of("yaml")])
def test_a_line_of_a_spec_is_read_and_has_keys_of_a_spec(code: str, line: str) -> None:
    parsed = yaml.safe_load(re.sub(r"\}, (?=\w+: \{)", "}\n", line))
    assert isinstance(parsed, dict)
    assert set(keys_of(parsed)) <= KEYS


@pytest.mark.parametrize(("code", "line"), [*lines_of("json")])
def test_a_line_of_json_is_read(code: str, line: str) -> None:
    json.loads(line.partition("  #")[0].replace(", ...}", "}"))


@pytest.mark.parametrize(("code", "line"), [*lines_of("shell")])
def test_a_command_is_understood(code: str, line: str) -> None:
    """The subcommand exists and takes these arguments; files are not read."""
    words = [word for word in shlex.split(line.replace("…", ""), comments=True) if not re.fullmatch(r"\w+=", word)]
    words = words[: next((place for place, word in enumerate(words) if word in "<>"), None)]
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    if words[0] == "megaplan":
        command: Any = typer.main.get_command(planner._app(words[1:]))
    elif words[0] == "megarun":
        pytest.importorskip("torch")
        from megarun.cli import main as runtime  # noqa: PLC0415

        runtime._mount_groups(words[1:])
        command = typer.main.get_command(runtime.app)
    else:
        return  # a program of others
    rest = words[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    if rest in (["--version"], ["--help"]):
        return
    command.make_context(words[0], list(rest), resilient_parsing="…" in line)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    assert {word.partition("=")[0] for word in rest[: [*rest, "--"].index("--")] if word.startswith("--")} <= known


@pytest.mark.parametrize(("code", "line"), [each for each in lines_of("text") if each.values[1].startswith("--set")])
def test_an_override_names_a_key(code: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    assert words[::2] == ["--set"] * (len(words) // 2)
    assert all(tuple(word.partition("=")[0].split(".")) in all_keys() for word in words[1::2])
