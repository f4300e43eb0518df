"""Whatever one value of a plan is changed to, every command answers: no bug report, no crash, no long wait."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megaplan.cli.main import run
from megaplan.plan.canonical import dumps
from megaplan.plan.digests import plan_digest

PLAN = Path(__file__).parents[3] / "plans" / "tiny-hybrid-pp2.json"
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([2**31, 2**53, 2**80, -(2**70)]),
    st.sampled_from(["", "x", "1", "AMED", "sha256:" + "0" * 64, "megaplan.plan/1"]),
    st.sampled_from([[], {}, [0], [[0, 2**40]], {"x": 1}, [[]]]),
)


def leaves(value, path=()):
    """Paths of every key and element, containers included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in items:
        yield (*path, step)
        yield from leaves(item, (*path, step))


PATHS = sorted(leaves(json.loads(PLAN.read_text())), key=str)


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    return tmp_path_factory.mktemp("edited") / "plan.json"


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@example(path=("inputs", "mesh", "pp"), value=3, resign=False, remove=False)  # the cuts of two slots, compared with a mesh of three
@given(path=st.sampled_from(PATHS), value=VALUES, resign=st.booleans(), remove=st.booleans())
def test_every_command_answers(edited, path, value, resign, remove):
    document = json.loads(PLAN.read_text())
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    if remove and isinstance(parent, dict):
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    if resign and all(isinstance(document.get(key), dict) for key in ("inputs", "decisions", "digests")):
        document["digests"]["plan"] = plan_digest(document["inputs"], document["decisions"])
    edited.write_text(dumps(document))
    for words in (
        ("estimate", str(edited)),
        ("show", str(edited)),
        ("check", str(edited)),
        ("diff", str(PLAN), str(edited)),
        ("diff", str(edited), str(PLAN), "--format", "json"),
        ("diff", str(edited), str(PLAN), "--format", "markdown"),
    ):
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = run(words)
        assert status in (0, 1, 2), words
        assert "MP499" not in out.getvalue() + err.getvalue(), (words, err.getvalue())
        assert sys.stdout is not out
