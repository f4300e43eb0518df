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
    steps = {step["name"]: step for step in action["runs"]["steps"]}
    step = steps["check plans"]
    assert set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text())) == set(action["inputs"])
    page = (ROOT / "docs" / "guides" / "review.md").read_text()
    assert all(f"| `{name}` |" in page for name in action["inputs"])
    summary = repository / "summary.md"
    given = {"PLANS": "plans/*.json", "STRICT": "true", "BASE": "HEAD", "FAIL_ON": "", "GITHUB_STEP_SUMMARY": str(summary)}
    given["COMMENT"] = str(repository / "comment.md")
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


def test_an_edited_spec_fails_the_hook_of_its_plan(repository):
    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    spec = repository / "plans" / "tiny.yaml"
    spec.write_text((ROOT / "plans" / "tiny-hybrid.yaml").read_text())
    entry = f'{hooks["megaplan-check"]["entry"]} "$@"'
    assert bash(entry, repository, "", "plans/tiny.yaml").returncode == 0
    spec.write_text(re.sub(r"micro_batch_size: \d+", "micro_batch_size: 64", spec.read_text()))
    edited = bash(entry, repository, "", "plans/tiny.yaml")
    assert (edited.returncode, "MP416" in edited.stderr) == (1, True)


def test_the_comment_of_a_pull_request_is_updated(repository):
    """The first run writes it, the second one changes it; without a change none is written."""
    (step,) = [step for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"] if step["name"] == "comment"]
    calls, programs = repository / "calls.txt", repository.parent / "programs"
    (programs / "gh").write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncase "$*" in *--paginate*) cat {repository}/id.txt;; esac\n')
    (programs / "gh").chmod(0o755)
    comment, known = repository / "comment.md", repository / "id.txt"
    known.write_text("")
    given = {"GH_TOKEN": "x", "COMMENT": str(comment), "REPOSITORY": "a/b", "NUMBER": "5"}
    assert bash(step["run"], repository, **given).returncode == 0
    assert len(calls.read_text().splitlines()) == 1
    comment.write_text("mesh.dp_shard: 1 → 2\n")
    assert bash(step["run"], repository, **given).returncode == 0
    assert "repos/a/b/issues/5/comments -F body=@" in calls.read_text()
    known.write_text("77\n")
    assert bash(step["run"], repository, **given).returncode == 0
    assert "PATCH repos/a/b/issues/comments/77" in calls.read_text()


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
