"""A checkpoint is believed only where its files agree: manifest, folder name, index, and the kinds of file that they are."""

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaplan.errors import MegaplanError
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.checkpoint import keeper
from megarun.checkpoint.index import INDEX, coverage_error, read_index
from megarun.checkpoint.leftovers import tidy
from megarun.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    PLAN,
    WITHOUT_DIGEST,
    Manifest,
    damaged_files,
    finished,
    list_checkpoints,
    read_manifest,
)
from megarun.checkpoint.save import Saver
from megarun.checkpoint.sums import FileRecord, record_of
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

pytestmark = pytest.mark.runtime
DATA = "__0_0.distcp"


def written(run_folder: Path, step: int, chunks: Any = None, shape: Any = (4, 4)) -> Path:
    """A checkpoint of one tensor, complete in all that is checked without reading tensors."""
    path = run_folder / FOLDER / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / DATA).write_bytes(bytes(64))
    (path / PLAN).write_text("{}")
    default = [[[0, 0], [4, 4], DATA, 0, 64]]
    tensor = {"dtype": "torch.float32", "shape": list(shape), "chunks": chunks if chunks is not None else default}
    (path / INDEX).write_text(json.dumps({"tensors": {"a": tensor}}))
    files = {name: record_of(path / name) for name in (DATA, PLAN, INDEX)}
    (path / MANIFEST).write_text(Manifest(step, 0, (4, 16), "sha256:a", "sha256:b", 1, "2.13.0", files).text())
    return path


def changed(path: Path, **values: Any) -> None:
    """Change keys of the manifest and leave its digest."""
    document = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(document | values))


@pytest.mark.parametrize(
    "values", [{"seed": 1}, {"course": {"skipped": [[1, 2]], "losses": []}}, {"files": {}}, {"digest": "00"}, {"more": 1}]
)
def test_a_changed_manifest_is_refused(values: Any, tmp_path: Path) -> None:
    path = written(tmp_path, 10)
    assert damaged_files(path, read_manifest(path)) == []
    changed(path, **values)
    with pytest.raises(MegaplanError, match=r"(?s)MP644.*digest [0-9a-f]{16}…"):
        read_manifest(path)


def test_the_digest_is_of_the_values(tmp_path: Path) -> None:
    """Other white space is the same manifest; a manifest without a digest is older than this format."""
    path = written(tmp_path, 10)
    changed(path)
    assert read_manifest(path).step == 10
    document = json.loads((path / MANIFEST).read_text())
    del document["digest"]
    (path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(MegaplanError, match="KeyError: 'digest'"):
        read_manifest(path)
    changed(path, format=WITHOUT_DIGEST)
    assert read_manifest(path).step == 10


def test_the_step_is_the_folder_s(tmp_path: Path) -> None:
    """A renamed checkpoint, and one whose manifest was taken from another; a copy outside of a run may have any name."""
    path = written(tmp_path, 10)
    path.rename(path.with_name("step-00000014"))
    with pytest.raises(MegaplanError, match="step = 10, the folder is step-00000014"):
        read_manifest(path.with_name("step-00000014"))
    path.with_name("step-00000014").rename(tmp_path / "copy")
    assert read_manifest(tmp_path / "copy").step == 10


@pytest.mark.parametrize("missing", [INDEX, PLAN, DATA])
def test_a_manifest_must_list_every_file_that_is_read(missing: str, tmp_path: Path) -> None:
    path = written(tmp_path, 10)
    manifest = read_manifest(path)
    files = {name: record for name, record in manifest.files.items() if name != missing}
    (path / MANIFEST).write_text(replace(manifest, files=files).text())
    assert any(missing in line and "not listed" in line for line in damaged_files(path, read_manifest(path)))


GAPS = {
    "a gap": ([[[0, 0], [2, 4], DATA, 0, 32]], "its chunks have 8 of 16 elements"),
    "an overlap": ([[[0, 0], [3, 4], DATA, 0, 32], [[2, 0], [1, 4], DATA, 0, 32]], "overlap at [2, 0]"),
    "outside": ([[[2, 0], [4, 4], DATA, 0, 64]], "ends outside of [4, 4]"),
    "other dims": ([[[0], [16], DATA, 0, 64]], "1 offsets"),
    "no chunk": ([], "0 of 16 elements"),
    "negative": ([[[-1, 0], [5, 4], DATA, 0, 64]], "-1 is not a count"),
    "another file": ([[[0, 0], [4, 4], "../x", 0, 64]], "not a plain file name"),
}


@pytest.mark.parametrize("what", GAPS)
def test_chunks_must_cover_a_tensor(what: str, tmp_path: Path) -> None:
    """Elements that no chunk has would keep their initial values without a word."""
    chunks, reason = GAPS[what]
    path = written(tmp_path, 10, chunks)
    with pytest.raises(MegaplanError) as refused:
        read_index(path)
    assert refused.value.diagnostics[0].code == "MP644"
    assert reason in refused.value.diagnostics[0].detail
    assert any(reason in line for line in damaged_files(path, read_manifest(path)))


def test_coverage_equals_a_count_of_every_element() -> None:
    """Random grids, one box of which is moved, doubled or dropped in half of the draws."""
    draw, answers = random.Random(0), set()
    for _ in range(400):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 3)))
        cuts = [sorted({0, size, *(draw.randrange(size + 1) for _ in range(2))}) for size in shape]
        cells = product(*(list(pairwise(each)) for each in cuts))
        boxes = [([low for low, _ in cell], [high - low for low, high in cell]) for cell in cells]
        if draw.random() < 0.5:
            index = draw.randrange(len(boxes))
            other = draw.choice(boxes)
            boxes[index : index + 1] = draw.choice(([], [other], [other, boxes[index]]))
        counts = np.zeros(shape, dtype=int)
        for offsets, sizes in boxes:
            counts[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] += 1
        covered = bool((counts == 1).all())
        assert (coverage_error(shape, boxes) is None) == covered, (shape, boxes)
        answers.add(covered)
    assert answers == {True, False}


def test_many_chunks_are_compared_along_the_dim_that_is_cut() -> None:
    chunks = [((0, index), (4, 1)) for index in range(8192)]
    assert coverage_error((4, 8192), chunks) is None


def fifo(path: Path) -> None:
    os.mkfifo(path)


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "a pipe": fifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop of links": lambda path: path.symlink_to(path),
    "a folder": Path.mkdir,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [MANIFEST, INDEX, DATA])
@pytest.mark.parametrize("what", SPECIAL)
def test_special_files_are_refused_without_waiting(what: str, name: str, tmp_path: Path) -> None:
    """A pipe would wait for a writer for ever, and a device has no end."""
    path = written(tmp_path, 10)
    (path / name).unlink()
    SPECIAL[what](path / name)
    if name == MANIFEST:
        with pytest.raises(MegaplanError, match="MP644"):
            read_manifest(path)
        assert [each.place for each in finished(tmp_path)] == [None], "damaged, not absent"
    else:
        assert any(line.startswith(f"{name}: ") for line in damaged_files(path, read_manifest(path)))


def names(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / FOLDER).iterdir())


def test_leftovers_of_a_killed_save(tmp_path: Path) -> None:
    """Killed between the two renames of a second save: the whole checkpoint has its name again, other hidden folders are removed."""
    for step in (2, 4, 6):
        written(tmp_path, step)
    folder = tmp_path / FOLDER
    (folder / "step-00000004").rename(folder / ".step-00000004.replaced")
    (folder / ".step-00000004.partial").mkdir()
    (folder / ".step-00000006.replaced").mkdir()
    (folder / ".step-00000002.removed").mkdir()
    (folder / ".step-00000099.partial").mkdir()
    (folder / ".mine").mkdir()
    assert tidy(tmp_path) == [folder / "step-00000004"]
    assert names(tmp_path) == [".mine", "step-00000002", "step-00000004", "step-00000006"]
    assert read_manifest(folder / "step-00000004").step == 4
    assert tidy(tmp_path / "nothing") == []


def test_a_list_shows_what_is_damaged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 2)
    (written(tmp_path, 4) / MANIFEST).unlink()
    assert run(["checkpoint", "list", str(tmp_path)]) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert "step-00000004  damaged: manifest.json: FileNotFoundError" in first
    assert "step-00000002  step 2" in second
    assert run(["checkpoint", "verify", str(tmp_path)]) == 1


@pytest.fixture
def words(tmp_path: Path, spec_with: Any) -> list[str]:
    """Train two small layers, saving every other step."""
    values = spec_with({"model.vocab_size": 257, "model.pattern": "AD", "model.num_layers": 2, "training.steps": 8})
    for section in ("mamba", "moe", "recurrent"):
        del values["model"][section]
    write_plan(make_plan(Spec.model_validate(values)), tmp_path / "plan.json")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(Path(__file__).read_text())
    tokens = tmp_path / "small.tokens"
    tokenize(read_corpus(tmp_path / "text"), TokenizerKind.BYTES, 257, tokens)
    return ["train", str(tmp_path / "plan.json"), "--data", str(tokens), "--out", str(tmp_path / "run"), "--save-every", "2"]


def test_what_cannot_be_read_or_removed_does_not_end_a_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensors that torch cannot read under matching checksums; leftovers of a kill; and an old checkpoint that cannot be removed."""
    assert run([*words, "--steps", "4"]) == 0
    folder = tmp_path / "run" / FOLDER
    newest = list_checkpoints(tmp_path / "run")[0]
    (newest / DATA).write_bytes(os.urandom((newest / DATA).stat().st_size))
    manifest = read_manifest(newest)
    (newest / MANIFEST).write_text(replace(manifest, files=manifest.files | {DATA: record_of(newest / DATA)}).text())
    (folder / "step-00000002").rename(folder / ".step-00000002.replaced")
    (folder / ".step-00000008.partial").mkdir()
    assert run(["checkpoint", "export", str(newest), "-o", str(tmp_path / "weights.safetensors")]) == 2
    assert "error[MP644]" in capfd.readouterr().err
    monkeypatch.setattr("megarun.checkpoint.storage.shutil.rmtree", _refuse_removed)
    assert run([*words, "--steps", "6"]) == 0
    said = capfd.readouterr().err
    assert "step-00000002, which a killed save had renamed" in said
    assert said.count("warning[MP646]") == 1
    assert "step-00000002, 2 steps done" in said
    assert run([*words, "--steps", "8", "--keep", "2"]) == 0
    said = capfd.readouterr().err
    assert "6 steps done" in said
    assert "warning[MP657]" in said
    assert "Operation not permitted" in said
    assert {"step-00000006", "step-00000008"} <= set(names(tmp_path / "run"))


def test_files_replaced_after_their_sums_are_not_loaded(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Data, index and plan of a run of another seed, put in place between the check and the reading: the checkpoint before is used."""
    assert run([*words, "--steps", "4"]) == 0
    other = [*words[:-3], str(tmp_path / "other"), *words[-2:]]
    assert run([*other, "--steps", "4", "--seed", "7"]) == 0
    whole = [*words[:-3], str(tmp_path / "whole"), *words[-2:]]
    assert run([*whole, "--steps", "4"]) == 0
    assert run([*whole, "--steps", "6"]) == 0
    real, newest = keeper.load_checkpoint, list_checkpoints(tmp_path / "run")[0]

    def swapped(found: Any, *args: Any, **named: Any) -> Any:
        if found.path == newest:
            for name in (DATA, INDEX, PLAN):
                shutil.copyfile(list_checkpoints(tmp_path / "other")[0] / name, newest / "new")
                (newest / "new").replace(newest / name)
        return real(found, *args, **named)

    monkeypatch.setattr(keeper, "load_checkpoint", swapped)
    capfd.readouterr()
    assert run([*words, "--steps", "6"]) == 0
    said = capfd.readouterr().err
    assert "warning[MP646]" in said
    assert "step-00000002, 2 steps done" in said
    kept = [{each["step"]: each["loss"] for each in _steps(tmp_path / name)} for name in ("run", "whole")]
    assert kept[0] == kept[1]


def _steps(out: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [each for each in records if "grad_norm" in each]


def test_saves_do_not_follow_links(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A link of a killed run's name is removed at the start; one that is made meanwhile ends the save; a linked old one is unlinked."""
    victim, folder = tmp_path / "victim", tmp_path / "run" / FOLDER
    (victim / "sub").mkdir(parents=True)
    (victim / "file").write_text("precious")
    folder.mkdir(parents=True)
    (folder / ".step-00000002.partial").symlink_to(victim)
    assert run([*words, "--steps", "2"]) == 0
    (folder / "step-00000001").symlink_to(victim)
    real = Saver.save

    def save(self: Saver, step: int, *more: Any) -> None:
        if step == 6:
            (folder / ".step-00000006.partial").symlink_to(victim)
        real(self, step, *more)

    monkeypatch.setattr(Saver, "save", save)
    assert run([*words, "--steps", "8"]) == 2
    assert "is a link to" in capfd.readouterr().err
    assert sorted(path.name for path in victim.iterdir()) == ["file", "sub"]
    assert (victim / "file").read_text() == "precious"
    assert "step-00000004" in names(tmp_path / "run")


def _refuse_removed(path: Path, **_: Any) -> None:
    if ".removed" in path.name:
        raise PermissionError(1, os.strerror(1))


def test_records_are_by_name() -> None:
    """The digest is over the same text whatever the order of files."""
    one, two = FileRecord(1, "a"), FileRecord(2, "b")
    first = Manifest(2, 0, (4, 16), "", "", 1, "", {"a": one, "b": two}).text()
    assert first == Manifest(2, 0, (4, 16), "", "", 1, "", {"b": two, "a": one}).text()
