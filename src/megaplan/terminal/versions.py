"""The text of `--version`: the versions for a bug report, read from installed packages without importing them."""

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
"""The root of a checkout; for an installed package, some folder of the environment."""
GIT_SECONDS = 2.0


def installed(package: str) -> str | None:
    """The version of an installed package; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout that this package is run from, with `+` if its files are changed; None outside a checkout."""
    if not os.path.exists(ROOT / ".git") or not os.path.isdir(ROOT / "src" / "megaplan"):
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def version_text(program: str, number: str, packages: Iterable[str]) -> str:
    """`megaplan 0.1.0 (commit 1e63d1700208)`, then Python and the packages, one line each."""
    found = commit()
    lines = [f"{program} {number}" + (f" (commit {found})" if found else "")]
    lines.append(f"python {platform.python_version()}, {platform.system()} {platform.machine()}")
    lines += [f"{package} {installed(package) or 'not installed'}" for package in packages]
    return "".join(f"{line}\n" for line in lines)
