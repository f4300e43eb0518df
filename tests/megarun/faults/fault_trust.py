"""Faults of what checkpoints and ranks take from each other: other folders, other data, other words, and runs that begin in the middle."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from fault_bench import SPEC, Bench, Case, Outcome, first_line, flip, losses, newest_step, refused, sections
from fault_launch import START_LIMIT_SECONDS, TWO_STAGES, layout_text, rank_text

from megaplan.spec.models import Mesh
from megarun.checkpoint.manifest import list_checkpoints
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

ODD = """
import json, os, sys
odd = json.loads(sys.argv.pop(1))
version = sys.argv.pop(1)
if os.environ["RANK"] == "1":
    sys.argv[1:] = odd
    if version:
        import megarun.training.agreement as agreement
        real = agreement.installed
        agreement.installed = lambda package: version if package == "torch" else real(package)
from megarun.cli.main import run
from megarun.launch.failure import exit_process
exit_process(run())
"""


def odd_rank(
    bench: Bench, name: str, words: Callable[[Path], list[str]], mesh: Mesh, nodes: int, version: str = ""
) -> tuple[Path, str, float, int]:
    """A job of which rank 1 gets other words, of the run's folder, or another version of torch: folder, stderr, seconds, status."""
    program, out, said = bench.folder / "odd.py", bench.folder / name.replace(" ", "-"), bench.folder / f"{name}.txt"
    program.write_text(ODD)
    job = bench.launch(out, said, program=[str(program), json.dumps(words(out)), version], mesh=mesh, nodes=nodes)
    seconds = job.end(START_LIMIT_SECONDS)
    assert job.status != 0
    return out, said.read_text(), seconds, job.status


OTHER_WORDS = {
    "another mesh": "the plan of another mesh",
    "another learning rate": "a plan with another learning rate",
    "other tokens": "another token file",
    "another mix": "the same token files in another proportion",
    "--steps": "another --steps",
    "--save-every": "another --save-every",
    "seed": "another seed",
    "rows": "a --validation-fraction",
    "--keep": "another --keep",
    "a storage": "a --checkpoint-url",
    "another torch": "another version of torch",
}
MORE = {
    "--steps": ["--steps", "5"],
    "--save-every": ["--save-every", "3"],
    "seed": ["--seed", "5"],
    "rows": ["--validation-fraction", "0.5"],
    "--keep": ["--keep", "5"],
}


def other_words(bench: Bench, what: str, mesh: Mesh = TWO_STAGES, nodes: int = 1) -> Outcome:
    """One rank was started with something else: all end before anything is built."""
    plan, tokens = bench.plan_of(mesh), bench.tokens
    faster = {**SPEC["training"], "learning_rate": 2 * SPEC["training"]["learning_rate"]}
    changed = {
        "another mesh": (plan, bench.plan_of(Mesh(dp_shard=mesh.world_size))),
        "another learning rate": (plan, bench.plan("other-rate", {**sections(mesh), "training": faster})),
        "other tokens": (tokens, _other_tokens(bench)),
        "another mix": (tokens, Path(f"{tokens}=3")),
    }

    def words(out: Path) -> list[str]:
        ours, other = changed.get(what, (plan, plan))
        more = ["--data", f"{_other_tokens(bench)}=1"] if what == "another mix" else MORE.get(what, [])
        more = [*more, *(["--checkpoint-url", f"file://{bench.folder}/odd-storage"] if what == "a storage" else [])]
        return [str(other) if word == str(ours) else word for word in bench.words(plan, out)] + more

    name = f"odd {what} {layout_text(mesh)} {nodes}"
    out, said, seconds, status = odd_rank(bench, name, words, mesh, nodes, "2.0.0" if what == "another torch" else "")
    assert said.count("error[MP656]") == 1, said
    assert not out.exists()
    first = said.splitlines().index(next(line for line in said.splitlines() if line.startswith("  rank 1 ")))
    read = re.sub(r"[0-9a-f]{16}…", "…", said.splitlines()[first + 1].strip())
    read = re.sub(r"/\S*/(?=[^/\s]+)", "", read)
    happened = f"rank 1 is given {OTHER_WORDS[what]}"
    return Outcome(happened, f"error[MP656]: …: {rank_text(1, mesh)}: {read}", None, seconds, status)


def folder_not_shared(bench: Bench, mesh: Mesh = TWO_STAGES, nodes: int = 1) -> Outcome:
    """A rank has a separate --out, as on nodes without a shared folder: nothing is trained."""
    other_folder = bench.folder / f"other-out-{nodes}"
    out, said, seconds, status = odd_rank(
        bench, f"not shared {nodes}", lambda _: bench.words(bench.plan_of(mesh), other_folder), mesh, nodes
    )
    assert said.count("error[MP659]") == 1, said
    assert not losses(out)
    assert not other_folder.exists()
    read = f"error[MP659]: …: {rank_text(1, mesh)}: {first_line(said, 'run.lock')}"
    return Outcome("--out of rank 1 is not the folder of the others", read, None, seconds, status)


def back_to_an_older_one(bench: Bench) -> Outcome:
    """A start from the middle of a run that has later checkpoints: they are kept, so are the new ones, and the run resumes from these."""
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


TRUST: dict[str, Case] = {
    "back to an older one": back_to_an_older_one,
    "newest two damaged": newest_two_damaged,
    "other data": lambda bench: other_data(bench, mixed=False),
    "other mix": lambda bench: other_data(bench, mixed=True),
}
ODD_RANKS: dict[str, Case] = {
    "folder not shared": folder_not_shared,
    **{f"one rank with {what}": (lambda bench, what=what: other_words(bench, what)) for what in list(OTHER_WORDS)},
}
