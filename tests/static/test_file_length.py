"""No file of `src/` and `kernels/` has more than 400 lines."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 400
SUFFIXES = {".py", ".css", ".js", ".html"}
VENDORED = "vendor"

pytestmark = pytest.mark.skipif(not (ROOT / "src").is_dir(), reason="needs the sources")


@pytest.mark.parametrize("source", ["src", "kernels"])
def test_no_file_is_longer_than_400_lines(source: str) -> None:
    """A longer file is divided by what its parts are for. Third-party files are kept as they were published."""
    files = [path for path in sorted((ROOT / source).rglob("*")) if path.suffix in SUFFIXES and VENDORED not in path.parts]
    assert len(files) > 100
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
