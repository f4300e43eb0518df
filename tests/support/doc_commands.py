"""The commands in README.md and docs: fenced blocks, what marks them, and where they run.

A block of commands is `console`: every command begins with `$ `, and the lines below it are what it prints, which is not compared. The
block is run by a test unless the line before it is a comment with the reason why not: `<!-- not run: needs two machines -->`. A comment
`<!-- exit status 1 -->` says how the block ends; without it every command ends with 0. With `<!-- output compared -->` the lines that a
block shows are lines of what it prints, in this order; others may be between them. All blocks of a tutorial run in one folder.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "errors"]  # examples of errors are not run
PAGES = [path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS] if path.is_file()]
PROGRAMS = "megaplan|megarun|torchrun|pytest|python|pip|make|git|scripts/"
_BLOCK = re.compile(r"^(?P<comment><!-- [^\n]* -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the comment before it, and its text."""

    page: Path
    line: int
    language: str
    comment: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Lines after `$ `, continued lines joined."""
        return re.findall(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)", self.text, re.MULTILINE)

    @property
    def reason(self) -> str:
        """Reason that it is not run; empty if it is."""
        found = re.match(r"<!-- not run: (.+) -->", self.comment)
        return found.group(1) if found else ""

    @property
    def status(self) -> int:
        found = re.match(r"<!-- exit status (\d+) -->", self.comment)
        return int(found.group(1)) if found else 0

    @property
    def shown(self) -> list[str]:
        """Lines that the page says the commands print, if they are compared."""
        if self.comment != "<!-- output compared -->":
            return []
        return re.sub(r"^\$ (?:[^\n]*\\\n)*[^\n]*\n", "", self.text, flags=re.MULTILINE).splitlines()

    @property
    def of_runtime(self) -> bool:
        return self.page.parent.name == "tutorials" or any(re.search(r"^(megarun|torchrun) ", command) for command in self.commands)


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("language")) + 1
            yield Block(page, line, match["language"], (match["comment"] or "").strip(), match["text"])


COMMAND_BLOCKS = [block for block in blocks() if block.language == "console"]
RUN_BLOCKS = [block for block in COMMAND_BLOCKS if not block.reason]


def prepare(folder: Path) -> None:
    """A working directory with the files that pages speak of: bundled specs and plans, and a spec, plan, and HF config of their own."""
    shutil.copytree(ROOT / "plans", folder / "plans")
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name, source in {"spec.yaml": "tiny-hybrid.yaml", "plan.json": "tiny-hybrid.json", "main.json": "nam56r-8xh200.json"}.items():
        shutil.copy(ROOT / "plans" / source, folder / name)
    for path in (Path(__file__).parent / "doc_files").iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)


def run_block(block: Block, folder: Path) -> None:
    """Run a block's commands in one shell; it must end as the page says."""
    programs = folder / ".programs"
    if not programs.is_dir():
        programs.mkdir()
        for name in ("megaplan", "megarun"):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {name} "$@"\n')
            (programs / name).chmod(0o755)
    sources = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": sources and _absolute(sources), "NO_COLOR": "1"}
    script = "\n".join(["set -e", *block.commands])
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == block.status, f"{block.name}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    printed = iter(done.stdout.splitlines())
    missing = [line for line in block.shown if line not in printed]  # an iterator is left behind the line that it found
    assert not missing, f"{block.name} shows {missing[0]!r}, which is not printed there:\n{done.stdout[-3000:]}"


def _absolute(paths: str) -> str:
    return os.pathsep.join(str(Path(path).absolute()) for path in paths.split(os.pathsep))
