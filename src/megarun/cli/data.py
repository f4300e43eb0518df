"""`megarun data`: prepares and inspects token files.

Results are printed on stdout, progress on stderr if it is a terminal. Exit status: 0 done, 2 an error.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megaplan.errors import MegaplanError
from megaplan.terminal import output
from megaplan.terminal.exit_status import ERROR
from megaplan.units import format_bytes, parse_bytes
from megarun.cli.examples import epilog

if TYPE_CHECKING:
    from megarun.data.corpus import Corpus, ProgressCallback
    from megarun.data.tokenize import Tokenized
    from megarun.data.tokenizer import TokenizerKind

INSPECT_FORMAT = "megarun.data-inspect/1"
DEFAULT_VOCAB_SIZE = 2048  # as in the bundled plans for one machine

app: typer.Typer = typer.Typer(name="data", help="Prepare and inspect token files.", no_args_is_help=True)


def _size(text: str) -> int:
    """`8000000`, `8MB` or `8MiB`."""
    try:
        size = int(text) if text.isdecimal() else parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if size < 1:
        raise typer.BadParameter(f"{text} is too small for a text")
    return size


@app.command("tokenize", epilog=epilog("data tokenize"))
def tokenize_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of UTF-8 texts; every file is one document.")],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The token file to write.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="bpe|bytes|FILE", help="BPE trained on DIR, bytes, or a tokenizer.json.")
    ] = "bpe",
    end: Annotated[
        str | None, typer.Option("--end-of-document", metavar="TOKEN", help="Token of FILE that ends a document; default: the usual one.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", metavar="N", help=f"Number of BPE ids, default {DEFAULT_VOCAB_SIZE}; bytes have 257.")
    ] = None,
    include: Annotated[str, typer.Option("--include", metavar="PATTERNS", help="File name patterns to read, like '*.h,*.hpp'.")] = "*",
    limit_bytes: Annotated[
        int | None,
        typer.Option("--limit-bytes", metavar="SIZE", parser=_size, help="Read evenly spread files up to this size, like 8000000 or 8MB."),
    ] = None,
    structure: Annotated[
        bool, typer.Option("--structure", help="Also write the lexical class of every token (C-like source), for features.structure.")
    ] = False,
    platform: Annotated[
        bool, typer.Option("--platform", help="Also write which folder of DIR every document is in, for features.platform.")
    ] = False,
) -> int:
    """Write the texts in DIR as one token file.

    Files are read in the order of their paths; other files than UTF-8 text are skipped and counted. The tokenizer is written next to FILE.
    """

    def work() -> None:
        from megarun.data.corpus import read_corpus  # noqa: PLC0415  (the tokenizer's library is not needed for --help)
        from megarun.data.token_file import tokenizer_file, tokenizer_path  # noqa: PLC0415
        from megarun.data.tokenize import check_output, tokenize  # noqa: PLC0415
        from megarun.data.tokenizer import check_vocab_size, read_tokenizer  # noqa: PLC0415

        file = tokenizer_file(Path(tokenizer))
        given = read_tokenizer(file, end) if file.is_file() else None
        if (vocab_size if given else end) is not None:
            raise typer.BadParameter("--vocab-size is for a new tokenizer, --end-of-document for a tokenizer file")
        kind = given.kind if given else _kind(tokenizer)
        wanted = given.vocab_size if given else vocab_size if vocab_size is not None else 257 if kind == "bytes" else DEFAULT_VOCAB_SIZE
        if given is None:
            check_vocab_size(kind, wanted)
        check_output(out)
        patterns = tuple(pattern.strip() for pattern in include.split(",") if pattern.strip())
        with _progress() as progress:
            corpus = read_corpus(folder, patterns, limit_bytes, progress, without=(out, tokenizer_path(out)))
            done = tokenize(corpus, kind, wanted, out, progress, structure=structure, platform=platform, given=given)
        output.write(_tokenized_text(corpus, done, out, wanted))

    return _answer(work, as_json=False)


@app.command("inspect", epilog=epilog("data inspect"))
def inspect_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A token file.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int:
    """Verify all bytes of FILE and print its counts and the unigram entropy of its tokens."""

    def work() -> None:
        document = _inspect(file)
        if as_json:
            output.write_json(document)
        else:
            output.write(_inspected_text(document))

    return _answer(work, as_json=as_json)


def _answer(work: Callable[[], None], *, as_json: bool) -> int:
    """Run a command and print its errors, as JSON if requested."""
    try:
        work()
    except MegaplanError as error:
        output.fail(error.diagnostics, as_json=as_json)
        return ERROR
    return 0


def _kind(text: str) -> TokenizerKind:
    from megarun.data.tokenizer import TokenizerKind  # noqa: PLC0415

    try:
        return TokenizerKind(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not bpe, bytes or a file", param_hint="--tokenizer") from None


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """A progress bar on stderr if it is a terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        from megarun.data.corpus import silent  # noqa: PLC0415

        yield silent
        return
    from rich.console import Console  # noqa: PLC0415  (only a terminal needs it)
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _tokenized_text(corpus: Corpus, done: Tokenized, path: Path, wanted_vocab_size: int) -> str:
    header, trained = done.header, done.tokenizer
    if trained.kind == "bytes":
        tokenizer = "bytes"
    elif trained.content:
        tokenizer = f"as given; {trained.tokenizer.id_to_token(trained.end_of_document_id)} ends a document"
    else:
        sample = f"{trained.sample_documents:,} of {header.num_documents:,} documents, {format_bytes(trained.sample_bytes)}"
        tokenizer = f"byte-level BPE, trained on {sample}"
    vocabulary = f"{header.vocab_size:,}"
    if header.vocab_size < wanted_vocab_size:
        vocabulary += f", not {wanted_vocab_size:,}: the sample has no further pair of tokens that occurs twice"
    rows = [
        ("documents", f"{header.num_documents:,}, {format_bytes(header.num_text_bytes)} of text"),
        ("tokens", f"{header.num_tokens:,} {header.dtype}, {header.num_text_bytes / header.num_tokens:.2f} bytes of text per token"),
        ("tokenizer", tokenizer),
        ("vocabulary", vocabulary),
        *([("structure", f"{header.structure}, {header.num_categories} classes")] if header.structure else []),
        *([("platform", f"{header.platform}, {header.num_platforms} platforms")] if header.platform else []),
        *(("skipped", f"{skip.num_files:,} {skip.reason} (first: {skip.first})") for skip in corpus.skipped),
        ("written", f"{path} ({format_bytes(header.file_bytes)})"),
        ("", f"{done.tokenizer_path}"),
    ]
    return _lines(rows)


def _inspect(path: Path) -> dict[str, object]:
    from megarun.data.statistics import measure  # noqa: PLC0415
    from megarun.data.token_file import TokenFile  # noqa: PLC0415

    source = TokenFile(path)
    source.verify()
    found = measure(source)
    return {
        "format": INSPECT_FORMAT,
        "file": str(path),
        "file_bytes": source.header.file_bytes,
        **source.header.as_document(),
        **asdict(found),
        "unigram_entropy_bits": found.unigram_entropy_bits,
        "uniform_entropy_nats": math.log(source.vocab_size),
        "tokenizer_file": _tokenizer_file(path, source.header.tokenizer_sha256),
    }


def _tokenizer_file(path: Path, sha256: str) -> dict[str, object]:
    """The tokenizer's JSON file, and whether it is the tokenizer of the tokens."""
    import hashlib  # noqa: PLC0415

    from megarun.data.token_file import tokenizer_path  # noqa: PLC0415

    tokenizer_json = tokenizer_path(path)
    try:
        found = hashlib.sha256(tokenizer_json.read_bytes()).hexdigest()
    except OSError:
        return {"path": str(tokenizer_json), "state": "missing"}
    return {"path": str(tokenizer_json), "state": "matches" if found == sha256 else "another tokenizer"}


def _inspected_text(document: dict[str, object]) -> str:
    get = document.__getitem__
    tokenizer_json = document["tokenizer_file"]
    assert isinstance(tokenizer_json, dict)  # _inspect made it
    used, vocab_size = get("vocabulary_used"), get("vocab_size")
    lengths = f"{get('longest_document_tokens'):,}, {get('median_document_tokens'):,}, {get('shortest_document_tokens'):,}"
    rows = [
        ("tokens", f"{get('num_tokens'):,} {get('dtype')}"),
        ("documents", f"{get('num_documents'):,}"),
        ("longest, median, shortest", f"{lengths} tokens"),
        ("vocabulary", f"{vocab_size:,}, of which {used:,} occur"),
        *([("structure", f"{get('structure')}, {get('num_categories')} classes")] if document.get("structure") else []),
        *([("platform", f"{get('platform')}, {get('num_platforms')} platforms")] if "platform" in document else []),
        ("tokenizer", f"{get('tokenizer')}; {tokenizer_json['path']}: {tokenizer_json['state']}"),
        ("unigram entropy", f"{get('unigram_entropy_nats'):.4f} nats, {get('unigram_entropy_bits'):.4f} bits per token"),
        ("uniform entropy", f"{get('uniform_entropy_nats'):.4f} nats: the loss of an untrained model"),
        ("payload sha256", f"{get('payload_sha256')}, as written"),
    ]
    return f"{get('file')}\n\n" + _lines(rows)


def _lines(rows: list[tuple[str, str]]) -> str:
    """Names and values in two aligned columns."""
    width = max(len(name) for name, _ in rows)
    return "".join(f"  {name.ljust(width)}  {value}\n" for name, value in rows)
