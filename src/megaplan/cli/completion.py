"""Completion of arguments in a shell: specs, plans, keys of a spec, devices, hosts and topics."""

import os
from collections.abc import Iterator
from pathlib import Path

ENDINGS = {"spec": (".yaml", ".yml", ".json"), "plan": (".json",)}


def specs(incomplete: str) -> list[str]:
    """Files that may be specs or plans, and folders."""
    return list(_files(incomplete, ENDINGS["spec"]))


def plans(incomplete: str) -> list[str]:
    """Files that may be plans, and folders."""
    return list(_files(incomplete, ENDINGS["plan"]))


def overrides(incomplete: str) -> list[str]:
    """`KEY=` of a spec's keys; after `device.name=` the devices, after `host.name=` the hosts."""
    from megaplan.devices import device_names  # noqa: PLC0415
    from megaplan.hosts.registry import HOSTS  # noqa: PLC0415

    values = {"device.name": device_names(), "host.name": tuple(HOSTS)}
    key, separator, _ = incomplete.partition("=")
    found = [f"{key}={value}" for value in values.get(key, ())] if separator else [f"{name}=" for name in _keys()]
    return [text for text in found if text.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    """Devices of the data file, also the last of several."""
    from megaplan.devices import device_names  # noqa: PLC0415

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in device_names() if name.startswith(last.lower())]


def hosts(incomplete: str) -> list[str]:
    """Frameworks."""
    from megaplan.hosts.registry import HOSTS  # noqa: PLC0415

    return [name for name in HOSTS if name.startswith(incomplete)]


def topics(incomplete: str) -> list[str]:
    """Topics of `megaplan explain`."""
    from megaplan.cli.key_topics import spec_keys  # noqa: PLC0415
    from megaplan.cli.topics import topic_names  # noqa: PLC0415

    return [name for name in (*topic_names(), *spec_keys()) if name.lower().startswith(incomplete.lower())]


def _files(incomplete: str, endings: tuple[str, ...]) -> Iterator[str]:
    folder, slash, start = incomplete.rpartition("/")
    place = Path(folder or ("/" if slash else "."))
    for path in sorted(place.iterdir()) if os.path.isdir(place) else ():
        if path.name.startswith(start) and (start or not path.name.startswith(".")):
            if os.path.isdir(path):
                yield f"{folder}{slash}{path.name}/"
            elif path.suffix in endings:
                yield f"{folder}{slash}{path.name}"


def _keys() -> Iterator[str]:
    """Keys of a spec that hold values, with their sections."""
    from megaplan.spec.fields import all_keys  # noqa: PLC0415

    keys = all_keys()
    sections = {path[:-1] for path in keys}
    yield from sorted({".".join(map(str, path)) for path in keys if path not in sections})
