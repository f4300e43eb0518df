"""How many of the measured launches the users' command takes, by giving it each of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import yaml

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.megatron.spec import import_megatron

MOST = 6
"""Arguments that are named."""


def import_lines(rows: list[dict[str, Any]]) -> list[str]:
    """What the page says of `megaplan import megatron`."""
    plain, with_vocabulary = (_imports(rows, vocabulary=vocabulary) for vocabulary in (False, True))
    found = ", ".join(
        f"`{key}` in {count}" for key, count in sorted(with_vocabulary[1].items(), key=lambda item: (-item[1], item[0]))[:MOST]
    )
    return [
        "**This page replays a private path.** It makes each run from its launch arguments by `job_from_arguments`, which no command",
        f"calls. The users' command, `megaplan import megatron`, takes {plain[0]} of the {len(rows)} runs in the data as they stand, and",
        f"{with_vocabulary[0]} of them if the padded vocabulary is written beside each. Arguments it refuses most often then:",
        f"{found}.",
        "The tensors, storage and phases behind both paths are the same; for a launch that the command does not take, the errors here",
        "promise nothing.",
        "",
    ]


def _imports(rows: list[dict[str, Any]], *, vocabulary: bool) -> tuple[int, Counter[str]]:
    """Launches taken, and the arguments that others were refused for."""
    taken, refused = 0, Counter[str]()
    for row in rows:
        arguments = {f"--{key.replace('_', '-')}": value for key, value in row["arguments"].items()}
        if vocabulary and row["padded_vocab_size"]:
            arguments["--padded-vocab-size"] = row["padded_vocab_size"]
        launch = {"ENV_VARS": row["environment"], "MODEL_ARGS": arguments}
        try:
            import_megatron(yaml.safe_dump(launch, sort_keys=False), "launch.yaml", (), row["gpus"])
        except MegaplanError as error:
            refused.update({found.location.key or "" for found in error.diagnostics if found.severity is Severity.ERROR})
        else:
            taken += 1
    return taken, refused
