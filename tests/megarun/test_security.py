"""Statements of docs/reference/security.md: files are data, and what a run writes stays in its folder."""

import ast
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megaplan.errors import MegaplanError
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.load import load_spec
from megaplan.spec.models import Spec
from megarun.checkpoint.index import INDEX, read_index
from megarun.checkpoint.manifest import MANIFEST, list_checkpoints, read_manifest
from megarun.checkpoint.sums import record_of
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

pytestmark = pytest.mark.runtime
SOURCES = Path(__file__).parents[2] / "src"
DANGEROUS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


class Touch:
    """Makes a file when it is read as a pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def words(tmp_path: Path, spec_with: Any) -> list[str]:
    """Train a small plan, with checkpoints."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(Path(__file__).read_text())
    tokens = tmp_path / "small.tokens"
    tokenize(read_corpus(tmp_path / "text"), TokenizerKind.BYTES, 257, tokens)
    settings = {"model.vocab_size": 257, "model.pattern": "AD", "model.num_layers": 2, "training.steps": 4}
    values = spec_with(settings)
    for section in ("mamba", "moe", "recurrent"):
        del values["model"][section]
    write_plan(make_plan(Spec.model_validate(values)), tmp_path / "plan.json")
    return ["train", str(tmp_path / "plan.json"), "--data", str(tokens), "--out", str(tmp_path / "runs" / "a"), "--save-every", "2"]


def test_a_checkpoint_runs_no_code(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A data file that is a pickle with a call in it, and the manifest of one who could write it; before, nothing left the run's folder."""
    assert run([*words, "--steps", "2"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"text", "small.tokens", "small.tokens.tokenizer.json", "plan.json", "runs"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    newest = list_checkpoints(tmp_path / "runs" / "a")[0]
    index = json.loads((newest / INDEX).read_text())
    chunks = [chunk for each in index["tensors"].values() for chunk in each["chunks"]]
    data = newest / chunks[0][2]
    data.write_bytes(pickle.dumps(Touch(tmp_path / "touched"), protocol=2))
    for chunk in chunks:
        chunk[3:] = [0, data.stat().st_size]
    (newest / INDEX).write_text(json.dumps(index))
    manifest = read_manifest(newest)
    records = {name: record_of(newest / name) for name in (data.name, INDEX)}
    (newest / MANIFEST).write_text(replace(manifest, files=manifest.files | records).text())
    assert run(words) == 2
    said = capfd.readouterr().err
    assert "error[MP644]" in said
    assert "UnpicklingError: Weights only load failed" in said
    assert "Traceback" not in said
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "a/b", "a\\b", ""])
def test_what_a_checkpoint_names_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    manifest = {
        "format": "megaplan.checkpoint/1",
        "step": 0,
        "seed": 0,
        "global_batch": [1, 1],
        "model_digest": "",
        "plan_digest": "",
        "world_size": 1,
        "torch": "",
        "course": {"skipped": [], "losses": []},
        "files": {"inside": {"bytes": 0, "sha256": ""}},
    }
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert list(read_manifest(tmp_path).files) == ["inside"]
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"files": {name: {"bytes": 0, "sha256": ""}}}))
    with pytest.raises(MegaplanError, match="not a plain file name"):
        read_manifest(tmp_path)
    tensor = {"dtype": "torch.float32", "shape": [1], "chunks": [[[0], [1], name, 0, 4]]}
    (tmp_path / INDEX).write_text(json.dumps({"tensors": {"a": tensor}}))
    with pytest.raises(MegaplanError, match="not a plain file name"):
        read_index(tmp_path)


def test_a_plan_cannot_be_named_as_a_path(spec_with: Any) -> None:
    with pytest.raises(ValidationError, match="name"):
        Spec.model_validate(spec_with({"name": "../../escaped"}))


WRITES_PICKLES = "megaplan/exporters/memory_snapshot.py"
"""The viewer of torch takes nothing else."""


def test_a_spec_makes_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"format: megaplan.spec/1\nname: !!python/object/apply:os.mkdir ['{tmp_path}/touched']\n")
    with pytest.raises(MegaplanError):
        load_spec(str(path))
    assert not (tmp_path / "touched").exists()


def test_no_source_reads_pickles() -> None:
    for path in SOURCES.rglob("*.py"):
        writes = path.relative_to(SOURCES).as_posix() == WRITES_PICKLES
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not found & DANGEROUS or (writes and isinstance(node, ast.Import)), path
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
                assert node.attr == "dumps", f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"), f"{path}:{node.lineno}"
