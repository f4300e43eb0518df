"""Defaults of a project: `[tool.megaplan]` of pyproject.toml, or megaplan.toml, in the working directory or the nearest one above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from megaplan.diagnostics import refuse

OWN, PROJECT = "megaplan.toml", "pyproject.toml"


class Settings(NamedTuple):
    """Defaults of a project; None where the file does not have them.

    Attributes:
        device: Name of the device.
        gpus: GPUs of a job.
        price: Price of one GPU for one hour, in any currency.
        calibration: Path of a device file (`megaplan calibrate -o`), relative to the file that names it.
        file: The file.
    """

    device: str | None = None
    gpus: int | None = None
    price: float | None = None
    calibration: str | None = None
    file: str | None = None


def find_settings(folder: Path | None = None) -> Settings:
    """The settings for a folder, or for the working directory.

    Raises:
        MegaplanError: MP144, the file is no TOML, or has an unknown key or a value of another type.
    """
    start = Path.cwd() if folder is None else folder
    for place in (start, *start.parents):
        for name in (OWN, PROJECT):
            path = place / name
            if path.is_file() and (table := _table(path)) is not None:
                return _settings(table, path)
        if (place / ".git").exists():
            break
    return Settings()


def _table(path: Path) -> dict[str, Any] | None:
    """The table of a file; None for a project without one."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.name == PROJECT and "tool.megaplan" not in text:
            return None
        import tomllib  # noqa: PLC0415  (most folders have no such file)

        document = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise refuse("MP144", f"{path}: {error}", file=str(path)) from None
    if path.name == PROJECT:
        document = document.get("tool", {}).get("megaplan")
    return document if isinstance(document, dict) else None


def _settings(table: dict[str, Any], path: Path) -> Settings:
    checks = {
        "device": lambda value: isinstance(value, str),
        "gpus": lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
        "price": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"),
        "calibration": lambda value: isinstance(value, str),
    }
    kinds = {"device": "text", "gpus": "a positive integer", "price": "a positive number", "calibration": "a path"}
    for key, value in table.items():
        if key not in checks:
            raise refuse("MP144", f"{key} is no key of it; its keys are {', '.join(checks)}", 'device = "h100"', file=str(path), key=key)
        if not checks[key](value):
            raise refuse("MP144", f"{key} = {value!r}, and it takes {kinds[key]}", file=str(path), key=key)
    found = dict(table)
    if "calibration" in found:
        found["calibration"] = str(path.parent / found["calibration"])
    return Settings(**found, file=str(path))
