"""Files that cannot be a spec: each way has its code, before anything is parsed that need not be."""

import io
import os
import stat
from pathlib import Path

import pytest
from spec_samples import SAMPLE, Refused

from megaplan.errors import Diagnostic, MegaplanError
from megaplan.spec.load import load_spec


def problem(path: Path | str) -> Diagnostic:
    with pytest.raises(MegaplanError) as caught:
        load_spec(str(path))
    (found,) = caught.value.diagnostics
    return found


def written(folder: Path, data: bytes, name: str = "spec.yaml") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, b"x: 1", "nam56r.yaml")
    found = problem(tmp_path / "nam65r.yaml")
    assert (found.code, found.location.file) == ("MP101", str(tmp_path / "nam65r.yaml"))
    assert found.hints[0] == str(tmp_path / "nam56r.yaml")


def test_a_directory_names_the_specs_inside(tmp_path: Path) -> None:
    inside = written(tmp_path, SAMPLE.encode())
    found = problem(tmp_path)
    assert (found.code, found.hints[0]) == ("MP102", str(inside))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = written(tmp_path, SAMPLE.encode())
    path.chmod(stat.S_IWUSR)
    assert problem(path).code == "MP103"


def test_a_path_through_a_file(tmp_path: Path) -> None:
    assert problem(written(tmp_path, b"x") / "spec.yaml").code == "MP103"
    assert problem("a\0b").code == "MP103"
    assert problem("x" * 5000).code == "MP103"


@pytest.mark.parametrize(
    ("path", "code", "hint"),
    [
        ("", "MP101", "megaplan new list"),
        ("no/such/spec.yaml", "MP101", "ls ."),
        ("https://huggingface.co/org/model/blob/main/config.json", "MP101", "megaplan estimate org/model --fetch"),
        ("empty folder", "MP102", "ls 'empty folder'"),
        ("loop", "MP103", "ls -l loop"),
    ],
)
def test_a_path_that_is_no_file_has_a_next_step(path: str, code: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    found = problem(path)
    assert (found.code, found.hints[0]) == (code, hint)


def test_ten_megabytes_are_refused_before_parsing(tmp_path: Path) -> None:
    found = problem(written(tmp_path, b"[" * 10_485_760))
    assert (found.code, found.detail) == ("MP104", f"{found.location.file} holds 10,485,760 bytes, and at most 1,048,576 are read")


def test_an_endless_file_is_refused() -> None:
    found = problem("/dev/zero")
    assert (found.code, found.detail) == ("MP104", "/dev/zero holds more than 1,048,576 bytes, and at most 1,048,576 are read")


@pytest.mark.parametrize("data", [b"", b" \n\t\n", b"# only a comment\n", b"\xef\xbb\xbf", b"---\n# nothing\n"])
def test_an_empty_file(tmp_path: Path, data: bytes) -> None:
    assert problem(written(tmp_path, data)).code in {"MP105", "MP112"}


@pytest.mark.parametrize(
    ("data", "code", "line", "detail"),
    [
        (SAMPLE.encode("utf-16"), "MP106", 1, "a NUL byte at offset 3"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "MP106", 3, "a NUL byte"),
        (b"name: a\nformat: \x07\n", "MP106", 2, "the control character U+0007"),
        (b"name: a\nname: caf\xe9\n", "MP107", 2, "the byte 0xe9 at offset 17"),
    ],
)
def test_a_file_that_is_no_text(tmp_path: Path, data: bytes, code: str, line: int, detail: str) -> None:
    found = problem(written(tmp_path, data))
    assert (found.code, found.location.line) == (code, line)
    assert detail in found.detail


@pytest.mark.parametrize(
    ("text", "code", "line", "column"),
    [
        ("mesh: {pp: 2, tp: 4\nbatch: 1\n", "MP108", 2, 6),
        ("a: b: c\n", "MP108", 1, 5),
        ("a:\n\tb: 1\n", "MP108", 2, 1),
        ("a: @x\n", "MP108", 1, 4),
        ("a: 'x\n", "MP108", 1, 4),
        ("%YAML 9.1\n---\na: 1\n", "MP108", 1, 1),
    ],
)
def test_broken_yaml_names_line_and_column(refused: Refused, text: str, code: str, line: int, column: int) -> None:
    (found,) = refused(text=text)
    assert (found.code, found.location.line, found.location.column) == (code, line, column)


@pytest.mark.parametrize(
    ("text", "code", "line", "detail"),
    [
        ('{"format": "megaplan.spec/1",}', "MP109", 1, "expecting property name"),
        ('{"a": 1,\n "b": NaN}', "MP109", None, "NaN is not a JSON number"),
        ("format: megaplan.spec/1\n", "MP109", 1, "expecting value"),
        ("[" * 100_000, "MP117", None, "inside each other"),
    ],
)
def test_broken_json_is_held_to_its_grammar(tmp_path: Path, text: str, code: str, line: int | None, detail: str) -> None:
    found = problem(written(tmp_path, text.encode(), "spec.json"))
    assert (found.code, found.location.line) == (code, line)
    assert detail in found.detail


@pytest.mark.parametrize(
    ("text", "code", "line", "detail"),
    [
        (SAMPLE + "batch: {micro_batch_size: 4, seq_length: 8}\n", "MP110", 26, "'batch' is already on line 24"),
        (SAMPLE.replace("tp: 1\n", "tp: 1\n  tp: 2\n"), "MP110", 19, "'mesh.tp' is already on line 18"),
        (SAMPLE + "---\nformat: megaplan.spec/1\n", "MP111", 26, "another document begins here"),
        (SAMPLE.replace("name: sample", "name: !!python/object/apply:os.system [ls]"), "MP113", 2, "python/object/apply:os.system"),
        (SAMPLE.replace("{mode: weighted}", "&s {together: *s}"), "MP114", 25, "*s is inside its own anchor's value"),
        (SAMPLE.replace("pp: 2", "pp: *nowhere"), "MP114", 14, "*nowhere"),
        (SAMPLE.replace("  pp: 2", "  ? [pp]\n  : 2"), "MP118", 14, "mesh has a key"),
        (SAMPLE.replace("  pp: 2", '  "": 2'), "MP118", 14, "mesh has a key"),
    ],
)
def test_readable_yaml_that_no_spec_may_have(refused: Refused, text: str, code: str, line: int, detail: str) -> None:
    found = refused(text=text)[0]
    assert (found.code, found.location.line) == (code, line)
    assert detail in found.detail


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "42\n", "null\n"])
def test_a_document_that_is_no_mapping(refused: Refused, text: str) -> None:
    (found,) = refused(text=text)
    assert found.code == "MP112"


def test_faults_of_the_text_and_of_its_values_come_together(refused: Refused) -> None:
    found = refused(text=SAMPLE.replace("  tp: 1", "  tp: x") + "name: again\n")
    assert [item.code for item in found] == ["MP110", "MP124"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(SAMPLE.encode())))
    assert load_spec("-").spec.name == "sample"
    assert load_spec("-").spec.name == "sample", "read again"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"mesh: [")))
    found = problem("-")
    assert (found.code, found.location.file, found.location.line) == ("MP108", "<stdin>", 1)
    monkeypatch.setattr("sys.stdin", None)
    assert problem("-").code == "MP103"
