"""Model names of the Hugging Face hub and their configs in the local cache; a config is downloaded only by `fetch_config`."""

import os
import re
from pathlib import Path

from megaplan.diagnostics import refuse

CONFIG = "config.json"
"""File of a model's folder that describes the model."""
MAX_CONFIG_BYTES = 16 * 2**20
"""Limit of a config, which lists every quantised module in some releases."""
HUB = "https://huggingface.co"
TIMEOUT_SECONDS = 20
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"({_PART})/({_PART})")


def is_model_name(path: str) -> bool:
    """True if the text can be a name `org/model`; a file of that path takes precedence."""
    return _NAME.fullmatch(path) is not None and not path.endswith((".json", ".yaml", ".yml"))


def cached_config(name: str) -> Path | None:
    """The config of a model in the local cache: from the branch main if cached, else from the latest snapshot.

    Args:
        name: `org/model`.

    Returns:
        The file; None if the text is not a model name, or the cache lacks the model's config.
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
    if re.fullmatch(r"[0-9a-f]{4,64}", commit) and os.path.isfile(main):
        return main
    found = [file for file in snapshots.glob(f"*/{CONFIG}") if os.path.isfile(file)]
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def fetch_config(name: str) -> Path:
    """The config of a model of the hub, downloaded into the local cache unless that has it.

    Args:
        name: `org/model`.

    Raises:
        MegaplanError: MP825, the text is not a model name, there is no network, or the hub refuses.
    """
    if not is_model_name(name):
        raise refuse("MP825", f"{name} is not a name org/model of the hub", "megaplan estimate Qwen/Qwen3-8B --fetch")
    found = cached_config(name)
    if found is not None:
        return found
    from urllib.error import HTTPError  # noqa: PLC0415  (only to download)
    from urllib.request import Request, urlopen  # noqa: PLC0415

    address = f"{os.environ.get('HF_ENDPOINT', HUB).rstrip('/')}/{name}/resolve/main/{CONFIG}"
    if not address.startswith(("https://", "http://")):
        raise refuse("MP825", f"HF_ENDPOINT = {os.environ['HF_ENDPOINT']} is not an address", f"HF_ENDPOINT={HUB}")
    token = os.environ.get("HF_TOKEN")
    asked = Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urlopen(asked, timeout=TIMEOUT_SECONDS) as answer:
            text, commit = answer.read(MAX_CONFIG_BYTES + 1), answer.headers.get("X-Repo-Commit") or ""
    except HTTPError as error:
        why = {
            401: "the model is gated or does not exist",
            403: "the model is gated",
            404: "there is no such model, or it has no config.json",
        }
        detail = f"{address}: status {error.code}{', ' + why[error.code] if error.code in why else ''}"
        raise refuse("MP825", detail, f"hf download {name} {CONFIG}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise refuse("MP825", f"{address} was not reached: {reason}", f"hf download {name} {CONFIG}") from None
    if len(text) > MAX_CONFIG_BYTES:
        raise refuse("MP825", f"{address} holds more than {MAX_CONFIG_BYTES:,} bytes", f"hf download {name} {CONFIG}")
    commit = commit if re.fullmatch(r"[0-9a-f]{4,64}", commit) else "0000"
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    target = folder / "snapshots" / commit / CONFIG
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit, encoding="utf-8")
    except OSError as error:
        raise refuse("MP825", f"{target}: {(error.strerror or type(error).__name__).lower()}", "HF_HOME=FOLDER") from None
    return target


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
