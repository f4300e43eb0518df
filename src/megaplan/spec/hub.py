"""Model names of the Hugging Face hub and their configs in the local cache; nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

CONFIG = "config.json"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"({_PART})/({_PART})")


def is_model_name(path: str) -> bool:
    """True if the text can be a name `org/model`; a file of that path takes precedence."""
    return _NAME.fullmatch(path) is not None and not path.endswith((".json", ".yaml", ".yml"))


def cached_config(name: str) -> Path | None:
    """The config of a model in the local cache: that of the branch main if the cache has it, else of the latest snapshot.

    Args:
        name: `org/model`.

    Returns:
        The file; None if the text is no model name, or the cache has no config of it.
    """
    if not is_model_name(name):
        return None
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    snapshots = folder / "snapshots"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    main = snapshots / commit / CONFIG
    if re.fullmatch(r"[0-9a-f]{4,64}", commit) and main.is_file():
        return main
    found = [file for file in snapshots.glob(f"*/{CONFIG}") if file.is_file()]
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def cache_folder() -> Path:
    """The hub's cache: `HF_HUB_CACHE`, or `hub` in `HF_HOME`, or in `~/.cache/huggingface`.

    Source: huggingface_hub, environment variables.
    """
    environment = os.environ
    if environment.get("HF_HUB_CACHE"):
        return Path(environment["HF_HUB_CACHE"]).expanduser()
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]).expanduser() / "hub"
    above = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(above).expanduser() / "huggingface" / "hub"
