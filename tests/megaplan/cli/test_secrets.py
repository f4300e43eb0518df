"""No output has a secret of the environment: errors of libraries repeat requests and addresses."""

from collections.abc import Iterator

import pytest

from megaplan import foreign
from megaplan.errors import Diagnostic, Location, Severity, render_diagnostic
from megaplan.foreign import HIDDEN, markdown, one_line, printable, without_secrets
from megaplan.terminal import output

SECRET = "wJalrXUtnFEMI/K7MDENG"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A secret, and variables whose names or values only look like one."""
    for name, value in (
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("WANDB_API_KEY", f"{SECRET}-longer"),
        ("TOKENIZERS_PARALLELISM", "a-value-of-no-secret"),
        ("SHORT_TOKEN", "training"),
    ):
        monkeypatch.setenv(name, value)
    foreign._secret_values.cache_clear()
    yield
    foreign._secret_values.cache_clear()


def test_values_of_secret_variables_are_hidden() -> None:
    for show in (printable, one_line, markdown):
        assert show(f"403: {SECRET} and {SECRET}-longer") == f"403: {HIDDEN} and {HIDDEN}"
    assert printable("a-value-of-no-secret of training") == "a-value-of-no-secret of training"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host/a?b=c", "https://…@host/a?b=c"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer …"),
        ("GET /a?X-Amz-Credential=AB%2Fus&X-Amz-Signature=0123abc&x=1", "GET /a?X-Amz-Credential=…&X-Amz-Signature=…&x=1"),
        ("hf_abcdefghijklmnopqrstuvwx", HIDDEN),
        ("AKIAIOSFODNN7EXAMPLE is no user", f"{HIDDEN} is no user"),
        ("hf_config and layers.0.bearer", "hf_config and layers.0.bearer"),
    ],
)
def test_tokens_of_known_forms_are_hidden(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_diagnostics_notes_and_json_have_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    found = Diagnostic("MP666", Severity.ERROR, "the storage of checkpoints fails", SECRET, Location(file=SECRET), (SECRET,))
    output.note([SECRET])
    output.report([found])
    output.write(f"{SECRET}\n")
    output.write_json({"detail": SECRET})
    said = capsys.readouterr()
    assert SECRET not in render_diagnostic(found) + said.out + said.err
