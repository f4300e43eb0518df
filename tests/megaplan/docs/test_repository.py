"""Files that the repository offers to others: the GitHub Action, the hooks of pre-commit, git's textconv, the site's configuration."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from doc_commands import ROOT, RUN_BLOCKS

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(not (ROOT / "action.yml").is_file(), reason="runs beside the sources")]

ERROR = re.compile(r"MP\d{3}\.md")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with one plan, committed, and `megaplan` on the path."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "megaplan").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megaplan "$@"\n')
    (programs / "megaplan").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("NO_COLOR", "1")
    if "PYTHONPATH" in os.environ:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(path).absolute()) for path in os.environ["PYTHONPATH"].split(os.pathsep)))
    folder = tmp_path / "repository"
    (folder / "plans").mkdir(parents=True)
    shutil.copy(ROOT / "plans" / "tiny-hybrid.json", folder / "plans" / "tiny.json")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "plan"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


def bash(script: str, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-e", "-c", script, *words]
    return subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def change(folder: Path) -> None:
    """Another plan in the place of the committed one."""
    shutil.copy(ROOT / "plans" / "tiny-hybrid-dp2.json", folder / "plans" / "tiny.json")


def test_the_action_checks_plans_and_shows_what_changes(repository):
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    *_, step = action["runs"]["steps"]
    assert set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text())) == set(action["inputs"])
    page = (ROOT / "docs" / "guides" / "review.md").read_text()
    assert all(f"| `{name}` |" in page for name in action["inputs"])
    summary = repository / "summary.md"
    given = {"PLANS": "plans/*.json", "STRICT": "true", "BASE": "HEAD", "FAIL_ON": "", "GITHUB_STEP_SUMMARY": str(summary)}
    assert set(step["env"]) <= set(given)
    same = bash(step["run"], repository, **given)
    assert (same.returncode, "no difference" in summary.read_text()) == (0, True), same.stderr
    change(repository)
    summary.unlink()
    assert bash(step["run"], repository, **given).returncode == 0
    assert "mesh.dp_shard" in summary.read_text()
    met = bash(step["run"], repository, **{**given, "FAIL_ON": "headroom<1000GiB"})
    assert met.returncode == 1
    plan = repository / "plans" / "tiny.json"
    plan.write_text(plan.read_text().replace('"dp_shard": 2', '"dp_shard": 3', 1))
    assert bash(step["run"], repository, **given).returncode == 1


def test_the_hooks_of_pre_commit_fail_for_what_is_wrong_alone(repository):
    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert set(hooks) == {"megaplan-check", "megaplan-estimate"}
    for name, hook in hooks.items():
        assert name in (ROOT / "docs" / "guides" / "review.md").read_text()
        assert re.search(hook["files"], "plans/tiny.json")
        right = bash(f'{hook["entry"]} "$@"', repository, "", "plans/tiny.json", "plans/tiny.json")
        assert right.returncode == 0, right.stderr
        (repository / "plans" / "bad.json").write_text('{"format": "megaplan.plan/1"}')
        wrong = bash(f'{hook["entry"]} "$@"', repository, "", "plans/bad.json", "plans/tiny.json")
        assert (wrong.returncode, "plans/bad.json" in wrong.stderr) == (1, True)


def test_git_shows_a_plan_as_text(repository):
    (repository / ".gitattributes").write_text("plans/*.json diff=megaplan\n")
    (told,) = [block for block in RUN_BLOCKS if block.page.name == "review.md" and "textconv" in block.text]
    (command,) = told.commands
    assert bash(command, repository).returncode == 0
    change(repository)
    shown = subprocess.run(["git", "diff"], cwd=repository, check=True, capture_output=True, text=True).stdout
    assert "+  2 ranks: dp_shard 2" in shown
    assert '"digests"' not in shown


def test_the_picture_of_the_architecture_is_what_its_script_draws():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "architecture_picture.py"), "--check"], check=False)
    assert done.returncode == 0, "make docs draws it anew"


def test_the_site_has_every_page(tmp_path):
    """The strict build of `make docs-site` needs the extra `docs`; this needs none. Pages of errors are listed by their index."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r"[\w/.-]+\.md", str(site["nav"])))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md") if not ERROR.fullmatch(path.name)}
    hook = (ROOT / "scripts" / "docs_site.py").read_text()
    outside = set(re.findall(r'": "([\w-]+\.md)"', hook))
    assert named == written | outside


def test_relative_links_lead_to_files():
    """In the repository; on the site `make docs-site` checks them."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.match(r"[a-z]+:|#", target):
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.relative_to(ROOT)}: {target}"
