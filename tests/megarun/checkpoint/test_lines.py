"""The checkpoints that a folder keeps, and the one that a run resumes from, with several lines or damaged files."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.checkpoint.lines import FIRST_LINE, Finished, Line, Place, by_line, next_line
from megarun.checkpoint.manifest import MANIFEST, OLD_FORMAT, list_checkpoints, read_manifest
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

pytestmark = pytest.mark.runtime
TEXT = "A token file holds what was written once and is read by every rank. " * 20
BRANCH: Line = (*FIRST_LINE, (1, 10))


def tokens(folder: Path, name: str, text: str) -> Path:
    """A token file of one text's bytes."""
    (folder / name).mkdir()
    (folder / name / "a.txt").write_text(text)
    tokenize(read_corpus(folder / name), TokenizerKind.BYTES, 257, folder / f"{name}.tokens")
    return folder / f"{name}.tokens"


@pytest.fixture
def command(tmp_path: Path, spec_with: Any) -> Callable[..., list[str]]:
    """Words that train two small layers for twenty steps."""
    values = spec_with({"model.vocab_size": 257, "model.pattern": "AD", "model.num_layers": 2, "training.steps": 20})
    for section in ("mamba", "moe", "recurrent"):
        del values["model"][section]
    write_plan(make_plan(Spec.model_validate(values)), tmp_path / "plan.json")
    data = tokens(tmp_path, "one", TEXT)

    def words(save_every: int, *more: str, data: Path = data) -> list[str]:
        return [
            *("train", str(tmp_path / "plan.json"), "--data", str(data), "--out", str(tmp_path / "run")),
            *("--save-every", str(save_every), *more),
        ]

    return words


def steps(folder: Path) -> list[int]:
    """Steps of the run's checkpoints, by name."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir() if path.name.startswith("step-"))


def finished(*places: tuple[Line, int] | int) -> list[Finished]:
    """Checkpoints as a folder shows them; a number alone is one whose manifest cannot be read."""
    return [
        Finished(Path(f"step-{each}"), each, None) if isinstance(each, int) else Finished(Path(f"step-{each[1]}"), each[1], Place(*each))
        for each in places
    ]


def test_the_newest_line_comes_first() -> None:
    """Each checkpoint once; another line's checkpoints come after all of the newest line."""
    found = finished((FIRST_LINE, 5), (FIRST_LINE, 10), (FIRST_LINE, 15), (FIRST_LINE, 20), (BRANCH, 12))
    assert [[each.step for each in line] for line in by_line(found)] == [[12, 10, 5], [20, 15]]
    assert [[each.step for each in line] for line in by_line(finished(20, (FIRST_LINE, 15)))] == [[20, 15]]
    assert by_line(finished(20, 10))[0][0].step == 20
    assert by_line([]) == []


def test_a_new_line_begins_where_others_are_left() -> None:
    found = finished((FIRST_LINE, 10), (FIRST_LINE, 20), (BRANCH, 12))
    assert next_line(found, Place(BRANCH, 12), 12)[0] == (*BRANCH, (2, 12)), "step 20 is still there"
    assert next_line(found[:2], Place(FIRST_LINE, 20), 20) == (FIRST_LINE, [])
    assert next_line(found[:2], Place(FIRST_LINE, 10), 10) == (BRANCH, [found[1]])
    assert next_line(found[:2], None, 0) == (((1, 0),), found[:2])
    assert next_line([], None, 40) == (FIRST_LINE, []), "another folder's checkpoint, nothing here"


def test_saves_after_a_resume_from_an_older_checkpoint_are_kept_and_resumed(
    command: Any, tmp_path: Path, golden: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A start from step 10 of 5, 10, 15, 20 keeps the new saves and the start, and the same command continues from them, not from 20."""
    folder = tmp_path / "run"
    assert run(command(5, "--keep", "4")) == 0
    assert steps(folder) == [5, 10, 15, 20]
    tenth = str(folder / "checkpoints" / "step-00000010")
    capfd.readouterr()
    assert run(command(4, "--keep", "2", "--resume", tenth, "--steps", "16")) == 0
    said = capfd.readouterr().err
    golden("MP654", said)
    assert steps(folder) == [10, 12, 15, 16, 20], "5 is removed: two complete ones are newer"
    assert [path.name for path in list_checkpoints(folder)] == [f"step-{step:08d}" for step in (16, 12, 10, 20, 15)]
    assert run(command(4, "--keep", "2", "--steps", "18")) == 0
    assert "step-00000016, 16 steps done" in capfd.readouterr().err
    assert steps(folder) == [15, 16, 18, 20]
    assert run(["checkpoint", "list", str(folder)]) == 0
    listed = capfd.readouterr().out.splitlines()
    assert ["another line" in line for line in listed] == [False, False, True, True]


@pytest.mark.parametrize("name", ["__0_0.distcp", MANIFEST])
def test_what_is_damaged_is_not_counted(name: str, command: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The newest two of four are damaged: two steps are repeated, and no complete checkpoint is removed for them."""
    folder = tmp_path / "run"
    assert run(command(4, "--keep", "4", "--steps", "16")) == 0
    for step in (12, 16):
        path = folder / "checkpoints" / f"step-{step:08d}" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x80
        path.write_bytes(data)
    assert run(command(9, "--keep", "2", "--steps", "9")) == 0
    assert capfd.readouterr().err.count("warning[MP646]") == 2
    assert steps(folder) == [8, 9, 12, 16]
    assert run(command(9, "--keep", "2", "--steps", "10")) == 0
    assert "step-00000009, 9 steps done" in capfd.readouterr().err
    assert {8, 9, 10} - set(steps(folder)) == {8}, "no longer the start, and behind two whole ones"


def test_a_checkpoint_that_lost_a_file_during_the_run_is_not_counted(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves after 4, 8, 12 and 16, and a file of 12 goes before the last one: 8 stays, with 16 the only whole ones."""
    from megarun.checkpoint.storage import CheckpointWriter  # noqa: PLC0415

    write = CheckpointWriter.write_data

    def damage_it(self: Any, *arguments: Any) -> Any:
        if self._manifest.step == 16:
            (tmp_path / "run" / "checkpoints" / "step-00000012" / "__0_0.distcp").unlink()
        return write(self, *arguments)

    monkeypatch.setattr(CheckpointWriter, "write_data", damage_it)
    assert run(command(4, "--keep", "2", "--steps", "16")) == 0
    assert steps(tmp_path / "run") == [8, 12, 16]


def test_other_data_is_refused_unless_it_is_meant(command: Any, tmp_path: Path, golden: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Another token file, or the same ones in another proportion; a renamed one is the same."""
    other = tokens(tmp_path, "two", TEXT[::-1])
    assert run(command(2, "--steps", "2")) == 0
    moved = tmp_path / "moved.tokens"
    shutil.copyfile(tmp_path / "one.tokens", moved)
    assert run(command(2, "--steps", "3", data=moved)) == 0
    capfd.readouterr()
    for data in (other, f"{moved}=1 --data {other}=1"):
        words = [part for word in command(2, "--steps", "4", data=data) for part in (word.split(" ") if "--data" in word else [word])]
        assert run(words) == 2
        said = capfd.readouterr().err
        golden("MP653" if data == other else "MP653-mix", said)
    assert max(steps(tmp_path / "run")) == 3
    assert run(command(2, "--steps", "4", "--other-data", data=other)) == 0
    (data,) = read_manifest(list_checkpoints(tmp_path / "run")[0]).data or ()
    assert data.name == "two.tokens"


def test_an_older_format_resumes_with_a_note(command: Any, tmp_path: Path, golden: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command(2, "--steps", "2")) == 0
    path = tmp_path / "run" / "checkpoints" / "step-00000002" / MANIFEST
    document = json.loads(path.read_text())
    del document["line"], document["data"]
    path.write_text(json.dumps(document | {"format": OLD_FORMAT}))
    capfd.readouterr()
    assert run(command(2, "--steps", "4")) == 0
    said = capfd.readouterr().err
    assert said.count("note[MP655]") == 1
    golden("MP655", said)
    assert "2 steps done" in said
    newest = read_manifest(list_checkpoints(tmp_path / "run")[0])
    assert newest.line == FIRST_LINE
    assert newest.data is not None
    assert newest.data[0].name == "one.tokens"
    assert steps(tmp_path / "run") == [2, 4]


@pytest.mark.parametrize("how", ["on another disk", "cut short"])
def test_a_save_that_does_not_see_a_rank_s_file_fails(
    how: str, command: Any, tmp_path: Path, golden: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank's files are in a folder that rank 0 does not see, or incomplete: nothing is renamed, and complete checkpoints are kept."""
    from megarun.checkpoint.storage import CheckpointWriter  # noqa: PLC0415

    write = CheckpointWriter.write_data

    def lose(self: Any, *arguments: Any) -> Any:
        written = write(self, *arguments)
        if self._manifest.step == 4:
            for path in self._partial.iterdir():
                if how == "cut short" and path.suffix == ".distcp":
                    path.write_bytes(path.read_bytes()[:4096])
                elif how != "cut short":
                    path.rename(tmp_path / path.name)
        return written

    monkeypatch.setattr(CheckpointWriter, "write_data", lose)
    assert run(command(2, "--steps", "4")) == 2
    said = capfd.readouterr().err
    golden(f"MP645-{how.replace(' ', '-')}", re.sub(r"[\d,]+ written", "N written", said))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.undo()
    assert run(command(2, "--steps", "4")) == 0
    assert "2 steps done" in capfd.readouterr().err


def test_a_checkpoint_without_a_file_that_its_index_names_is_not_whole(
    command: Any, tmp_path: Path, golden: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Older versions left such a checkpoint where nodes did not share --out: `verify` reports it, and a resume takes the previous one."""
    assert run(command(2, "--steps", "4")) == 0
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    manifest = read_manifest(newest)
    del manifest.files["__0_0.distcp"]
    (newest / "__0_0.distcp").unlink()
    (newest / MANIFEST).write_text(manifest.text())
    assert run(["checkpoint", "verify", str(tmp_path / "run")]) == 1
    said = capfd.readouterr()
    assert f"{newest}  damaged" in said.out
    golden("MP644-unlisted", said.err)
    assert run(command(2, "--steps", "6")) == 0
    assert "2 steps done" in capfd.readouterr().err
