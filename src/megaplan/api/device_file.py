"""A device file, as `megaplan calibrate -o FILE` writes it: shares of a device's peaks that large products reach, and factors of steps."""

import json
import os
from typing import Any

from megaplan.diagnostics import refuse
from megaplan.spec.read import STDIN, read_text

FORMAT = "megaplan.calibration/1"
KEY, FACTOR = "device.reached", "device.step_factor"


def device_changes(path: str | os.PathLike[str], device: str, host: str, subject: str) -> list[str]:
    """The shares of a device, and the factor of its steps, as changes of a spec: `device.reached={"bf16": 0.71}`.

    Args:
        path: Path of the device file.
        device: Device of the spec.
        host: Host of the spec; a factor of another host's steps is not taken.
        subject: The path of the spec or plan.

    Raises:
        MegaplanError: MP491, the file is not a device file, or has no shares of the device; MP480, both are standard input.
    """
    name = os.fspath(path)
    if name == subject == STDIN:
        raise refuse("MP480", "the spec or plan and --device-file are both standard input", "name a file for one of them")
    shares: dict[str, Any] = {}
    factors: list[str] = []
    found = _calibrations(name)
    for each in found:
        if each["device"] == device:
            shares |= each["reached"]
            factors += [f"{FACTOR}={json.dumps(each['step_factor'])}"] if "step_factor" in each and each.get("host") == host else []
    if not shares:
        known = ", ".join(dict.fromkeys(str(each["device"]) for each in found))
        raise refuse(
            "MP491",
            f"{name} has the shares of {known or 'no device'}, but device.name = {device}",
            f"--set device.name={device}",
            file=name,
        )
    return [f"{KEY}={json.dumps(shares)}", *factors[-1:]]


def _calibrations(name: str) -> list[dict[str, Any]]:
    hint = "megaplan calibrate rows.json -o device.json"
    try:
        document: Any = json.loads(read_text(name))
    except (ValueError, RecursionError) as error:
        raise refuse("MP491", f"{name} is not JSON: {error}", hint, file=name) from None
    found = document.get("calibrations") if isinstance(document, dict) and document.get("format") == FORMAT else None
    if not isinstance(found, list):
        raise refuse("MP491", f"{name} is not a document of format {FORMAT}", hint, file=name)
    for number, each in enumerate(found):
        if not isinstance(each, dict) or not isinstance(each.get("device"), str) or not isinstance(each.get("reached"), dict):
            raise refuse("MP491", f"calibrations[{number}] of {name} has no device with its shares", hint, file=name)
    return found
