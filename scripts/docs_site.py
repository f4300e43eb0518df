"""Hooks of mkdocs: pages that lie outside docs/, the links that lead to them, and the placeholders of the errors' pages.

The repository's own links are relative to each file and stay as they are. On the site README.md is the home page, and what it names under
Its folder has `docs/`; other pages of the repository become pages of the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/pending.md": "pending.md",
    "benchmarks/results/mutants.md": "mutants.md",
}
"""Pages of the repository outside docs/, and where they are on the site."""
FOLDER_PAGE = "README.md"
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages outside docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415  (only the site's build has mkdocs)

    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links of a page to where their targets are on the site, and fill the placeholders of an error's page."""
    sources = {place: path for path, place in PAGES.items()}
    place = page.file.src_uri
    if place.startswith("errors/MP"):
        from megaplan.cli.error_pages import filled  # noqa: PLC0415  (as above)

        markdown = filled(markdown)
    return site_links(markdown, sources.get(place, f"docs/{place}"), place)


def site_links(markdown: str, path: str, place: str) -> str:
    """Links of a repository file as links of the site.

    Args:
        markdown: Text of the page.
        path: The file in the repository.
        place: The page on the site.
    """

    def rewritten(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups(default="")
        if re.match(r"[a-z]+:", target):
            return match.group()
        return f"{before}{_on_site(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)), place)}{anchor}{after}"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(rewritten, markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewritten, markdown[end:])])


def _on_site(target: str, place: str) -> str:
    """A file of the repository as the page at `place` names it; one that is not a page stays, and the strict build says so."""
    if target.startswith("docs/") and (ROOT / target).is_dir():
        target = f"{target}/{FOLDER_PAGE}"
    found = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else target)
    return posixpath.relpath(found, posixpath.dirname(place) or ".")
