"""Faults of what checkpoints and ranks take from each other: other folders, other data, other words, and runs that begin in the middle."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from fault_bench import ERROR, Bench, Outcome, end, first_line, flip, losses, newest_step, refused

from megarun.checkpoint.manifest import list_checkpoints
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

ODD = """
import json, os, sys
odd = json.loads(sys.argv.pop(1))
if os.environ["RANK"] == "1":
    sys.argv[1:] = odd
from megarun.cli.main import run
from megarun.launch.failure import exit_process
exit_process(run())
"""


def odd_rank(bench: Bench, name: str, words: Callable[[Path], list[str]]) -> tuple[Path, str, float]:
    """Two ranks under torchrun, of which rank 1 gets other words, of the run's folder: the folder, what was said, seconds."""
    program, out, said = bench.folder / "odd.py", bench.folder / name.replace(" ", "-"), bench.folder / f"{name}.txt"
    program.write_text(ODD)
    process = bench.launch(out, said, program=[str(program), json.dumps(words(out))])
    seconds = end(process)
    assert process.returncode != 0
    return out, said.read_text(), seconds


def other_words(bench: Bench, what: str) -> Outcome:
    """One rank was started with something else: both end before anything is built."""
    plan, tokens = bench.two, bench.tokens
    other = bench.plan("other-mesh", {"mesh": {"dp_shard": 2}}), _other_tokens(bench)

    def words(out: Path) -> list[str]:
        usual = bench.words(plan, out)
        swapped = {str(plan): str(other[0])} if what == "another mesh" else {str(tokens): str(other[1])} if what == "other tokens" else {}
        more = {"--save-every": ["--save-every", "3"], "seed": ["--seed", "5"], "rows": ["--validation-fraction", "0.5"]}.get(what, [])
        return [swapped.get(word, word) for word in usual] + more

    out, said, seconds = odd_rank(bench, f"odd {what}", words)
    assert said.count("error[MP656]") == 1, said
    assert not out.exists()
    first = said.splitlines().index(next(line for line in said.splitlines() if line.startswith("  rank 1 ")))
    read = re.sub(r"[0-9a-f]{16}…", "…", said.splitlines()[first + 1].strip())
    return Outcome(f"rank 1 of two is given {OTHER_WORDS[what]}", f"error[MP656]: …: rank 1 (pp 1): {read}", None, seconds, ERROR)


OTHER_WORDS = {
    "another mesh": "the plan of another mesh",
    "other tokens": "another token file",
    "--save-every": "another --save-every",
    "seed": "another seed",
    "rows": "a --validation-fraction",
}


def folder_not_shared(bench: Bench) -> Outcome:
    """Each of two ranks has a separate --out, as on nodes without a shared folder: nothing is trained."""
    other_folder = bench.folder / "other-out"
    out, said, seconds = odd_rank(bench, "not shared", lambda _: bench.words(bench.two, other_folder))
    assert said.count("error[MP659]") == 1, said
    assert not losses(out)
    assert not other_folder.exists()
    read = first_line(said, "run.lock")
    return Outcome("--out of one rank is not the folder of the other", f"error[MP659]: …: rank 1 (pp 1): {read}", None, seconds, ERROR)


def back_to_an_older_one(bench: Bench) -> Outcome:
    """From the middle of a run that has later checkpoints: they are kept, so are the new ones, and the run resumes from these."""
    out = bench.folder / "back"
    assert bench.here([*bench.words(bench.one, out, "--keep", "4", "--steps", "8")])[0] == 0
    named = out / "checkpoints" / "step-00000004"
    words = [*bench.words(bench.one, out, "--resume", str(named), "--steps", "9"), "--save-every", "5"]
    status, said, seconds = bench.here(words)
    assert status == 0, said
    assert {path.name for path in list_checkpoints(out)} == {f"step-{step:08d}" for step in (4, 5, 6, 8, 9)}
    resumed, _ = bench.resume(out, 9)
    return Outcome(
        "--resume of an older checkpoint, then the same command without it",
        f"{first_line(said, 'warning[MP654]')}; then {first_line(resumed, 'resumed from')}",
        0,
        seconds,
        status,
    )


def newest_two_damaged(bench: Bench) -> Outcome:
    """Neither counts among those that are kept, and what is whole stays."""
    out = bench.folder / "two-damaged"
    assert bench.here([*bench.words(bench.one, out, "--keep", "4", "--steps", "8")])[0] == 0
    for path in list_checkpoints(out)[:2]:
        flip(path / "__0_0.distcp")
    status, said, seconds = bench.here([*bench.words(bench.one, out, "--steps", "5"), "--save-every", "5"])
    assert status == 0, said
    assert newest_step(out) == 5
    assert {path.name for path in list_checkpoints(out)} >= {"step-00000004", "step-00000005"}
    read = f"2 × {first_line(said, 'warning[MP646]')}; {first_line(said, 'resumed from')}"
    assert said.count("warning[MP646]") == 2
    resumed, _ = bench.resume(out, 5)
    assert "5 steps done" in resumed
    return Outcome("both of the newest two checkpoints damaged", read, 4, seconds, status)


def _other_tokens(bench: Bench) -> Path:
    path = bench.folder / "other.tokens"
    if not path.exists():
        text = bench.folder / "other"
        text.mkdir()
        (text / "a.txt").write_text("another text\n" * 400)
        tokenize(read_corpus(text), TokenizerKind.BYTES, 257, path)
    return path


def other_data(bench: Bench, mixed: bool) -> Outcome:
    """The run continues with other tokens, or with the same in another proportion."""
    out, other = bench.whole(f"other-data-{mixed}", 2), _other_tokens(bench)
    data = ["--data", f"{bench.tokens}=3", "--data", f"{other}=1"] if mixed else ["--data", str(other)]
    words = ["train", str(bench.one), *data, "--out", str(out), "--save-every", "2"]
    row = refused(bench, f"{'a mix with other tokens' if mixed else 'another token file'} after the checkpoint", words, "MP653")
    assert newest_step(out) == 2
    return row
