"""Text from files reaches no terminal, comment or picture as anything except text."""

import json
import re
import xml.dom.minidom
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, render_diagnostic
from megaplan.foreign import markdown, one_line, printable
from megaplan.foreign import xml as as_xml
from megaplan.terminal.table import markdown_table

HOSTILE = "\x1b]0;title\x07\x1b[31m\u009b2J\u202e\u2028\r\b## forged"
FORGED = f"{HOSTILE}\n## All checks passed\n\n<script>alert(1)</script> [click](http://x) ![x](http://y)"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\ud800-\udfff]")
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=60) | st.sampled_from([HOSTILE, FORGED])


@given(ANY_TEXT)
def test_no_control_character_is_left(text: str) -> None:
    assert not CONTROL.search(printable(text))
    assert printable(text).encode().decode() == printable(text), "a stream can write it"
    assert not re.search(r"[\t\n]", one_line(text))
    assert printable(printable(text)) == printable(text)


@given(ANY_TEXT)
def test_an_escape_is_json_s(text: str) -> None:
    """So a document that is escaped as a whole still has the same values."""
    assert json.loads(printable(json.dumps(text, ensure_ascii=False))) == text


@given(ANY_TEXT)
def test_markdown_and_xml_hold_only_text(text: str) -> None:
    assert not re.search(r"[<>\n]|\]\(", markdown(text))
    document = f'<a b="{as_xml(text)}">{as_xml(text)}</a>'
    element = xml.dom.minidom.parseString(document.encode()).documentElement
    shown = "".join(node.data for node in element.childNodes)
    assert shown == element.getAttribute("b") == one_line(text)


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_a_diagnostic_has_only_its_own_lines(detail: str, file: str, hint: str) -> None:
    found = diagnostic("MP101", detail, Location(file=file, key=file), [hint])
    said = render_diagnostic(found)
    assert not CONTROL.search(said)
    for line in said.splitlines()[1:]:
        assert not line or line.startswith(("  ", "hint: ")), line
    assert sum(line.startswith("hint: ") for line in said.splitlines()) == 2


@given(ANY_TEXT)
def test_a_table_has_one_line_a_row(text: str) -> None:
    assert len("\n".join(markdown_table([("a", "b"), (text, "1")])).split("\n")) == 3


@pytest.fixture
def hostile(megaplan, here: Path) -> Path:
    """Two plans of a manual split whose reason and invariants were written to be shown."""
    spec = yaml.safe_load(Path("plans/tiny-hybrid-pp2.yaml").read_text())
    layers = spec["model"]["num_layers"] if "num_layers" in spec["model"] else len(spec["model"]["pattern"])
    forged = FORGED.replace("\u009b", "")  # a plan with it is refused: MP106
    for name, at, reason in (("one", layers // 2, forged), ("two", layers // 2 - 1, forged + "2")):
        spec["split"] = {
            "mode": "manual",
            "spans": [[0, at], [at, layers]],
            "reason": reason,
            "protects": ["a\n## All checks passed", forged],
        }
        Path(f"{name}.yaml").write_text(yaml.safe_dump(spec))
        assert megaplan("split", f"{name}.yaml", "-o", f"{name}.json").status == 0
    return here


def test_no_renderer_passes_it(megaplan, hostile: Path) -> None:
    """Every command that shows a plan, in every form that it has."""
    commands = [
        ("split", "one.yaml", "-o", "three.json"),
        ("show", "one.json"),
        ("diff", "one.json", "two.json"),
        ("diff", "one.json", "two.json", "--format", "markdown"),
        ("diff", "one.json", "two.json", "--format", "json"),
        ("check", "one.json"),
        ("estimate", "one.json"),
    ]
    shown = ""
    for words in commands:
        ran = megaplan(*words)
        assert not CONTROL.search(ran.out + ran.err), words
        shown += ran.out + ran.err
        if "markdown" in words:
            assert "split.reason: \\u001b" in ran.out, "the reason is shown"
            assert not any(line.startswith("## ") for line in ran.out.split("\n"))
            assert "<script" not in ran.out
            assert "](http" not in ran.out
        elif "json" not in words:
            assert not any(line.startswith("## ") for line in (ran.out + ran.err).split("\n")), words
    assert "\\u001b" in shown


@pytest.mark.parametrize("text", ['"\\e[31mkey": 1', 'model: {"a\\nerror[MP999]: b": 1}', 'name: "\\x9b2J"'])
def test_an_error_about_a_file_passes_nothing(text: str, megaplan, here: Path) -> None:
    Path("bad.yaml").write_text(f"format: megaplan.spec/1\n{text}\n")
    ran = megaplan("estimate", "bad.yaml")
    assert ran.status == 2
    assert not CONTROL.search(ran.out + ran.err)
    assert not any(line.startswith("error[MP999]") for line in ran.err.split("\n"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--hf-token hunter2 --seed 1", "--hf-token … --seed 1"),
        ("--my-secret-token=hunter2", "--my-secret-token=…"),
        ("export WANDB_API_KEY=hunter2; torchrun", "export WANDB_API_KEY=… torchrun"),
        ('["--wandb-api-key hunter2", "--eod-token 5"]', '["--wandb-api-key …", "--eod-token 5"]'),
        ("curl -H 'Authorization: Bearer hunter2hunter2'", "curl -H 'Authorization: Bearer …'"),
        ("https://user:hunter2@host/x", "https://…@host/x"),
        ("--tokenizer-type Null --tokens 2T --hf-token --seed 1", "--tokenizer-type Null --tokens 2T --hf-token --seed 1"),
        ("HF_TOKEN=$MINE PAD_TOKEN_ID=7", "HF_TOKEN=$MINE PAD_TOKEN_ID=7"),
    ],
)
def test_values_that_are_named_as_secrets_are_not_shown(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
