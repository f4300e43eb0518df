"""`MaxTextConfig`: files and arguments of a MaxText run while they are read.

A later file or argument replaces the values of earlier ones, and all of them replace those of the file of the model, as in `pyconfig.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

import yaml

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.hosts.maxtext.policies import TENSORS
from megaplan.importers.maxtext.keys import DEFAULTS, IGNORED, REFUSED, SLICE, SLICES
from megaplan.importers.maxtext.model import DEFAULTS as OF_MODEL
from megaplan.importers.maxtext.model import models
from megaplan.importers.program_config import ProgramConfig
from megaplan.importers.structure import Policy
from megaplan.spec.comments import SECTION, settings_of_section
from megaplan.spec.read import display_name, read_text

WORD = re.compile(r"""(?<![\w.$-])([a-z][a-z0-9_]*)=("[^"]*"|'[^']*'|\[[^\]]*\]|[^\s"'\\]*)""")
"""An argument of MaxText in a script; names of environment variables have capital letters."""
XPK = {SLICE: re.compile(r"--(?:device|tpu)[-_]type[= ]([\w-]+)"), SLICES: re.compile(r"--num[-_]slices[= ](\d+)")}
"""Options of the launcher that say the slice."""
OTHER_FILE = re.compile(r"[\w./${}-]*?([\w.-]+\.ya?ml)\b")
BASE = "base.yml"
WHOLE = 300
"""Keys from which on a file is base.yml as a whole, so that most of its keys are none of this import's."""


class MaxTextConfig(ProgramConfig):
    """Keys of files and arguments; every one is read, refused, or reported.

    Attributes:
        values: Values by key, without defaults.
        settings: `KEY=VALUE` texts of the section that `megaplan export` writes.
        name: Name of the first file, or of the arguments.
    """

    defaults = DEFAULTS

    def __init__(self, inputs: Sequence[str], policy: Policy | None = None) -> None:
        """Read the inputs in order.

        Args:
            inputs: Names of files, `-` for stdin, and `key=value` arguments.
            policy: Policy for keys that the importer does not know.

        Raises:
            MegaplanError: MP916, a file is none of MaxText's; errors of reading a file.
        """
        super().__init__("arguments", policy)
        self.settings: list[str] = []
        self._others: list[str] = []
        given: dict[str, Any] = {}
        files = [text for text in inputs if "=" not in text]
        for text in inputs:
            given |= self._of_file(text) if text in files else dict(_words(text))
        if files:
            self.name = display_name(files[0])
        self._given = {key: value for key, value in given.items() if key not in self._policy.ignored}
        self._whole = len(self._given) > WHOLE
        self.values = {**self._of_model(), **self._given}
        self._check_keys()

    def _of_file(self, name: str) -> dict[str, Any]:
        """Values of YAML, or the arguments in the text of a script."""
        text = read_text(name)
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError:
            found = None
        if isinstance(found, dict) and any(key in DEFAULTS for key in found):
            self.settings += settings_of_section(found.pop(SECTION, None) or {})
            return {str(key): value for key, value in found.items()}
        words = dict(_words(text))
        if not any(key in DEFAULTS for key in words):
            raise MegaplanError([diagnostic("MP916", "no key of MaxText, in YAML or as key=value", Location(display_name(name)))])
        options = {key: match[1] for key, pattern in XPK.items() if (match := pattern.search(text))}
        words.pop("run_name", None)
        self._others += [found for found in OTHER_FILE.findall(text) if found != BASE]
        return options | {key: value for key, value in words.items() if key in DEFAULTS or key in REFUSED}

    def _of_model(self) -> dict[str, Any]:
        """Keys of the file of the model that is named; none for the default model, or if base.yml has the model's own values."""
        name = self._given.get("model_name", "default")
        if name == "default" and not self._whole and not self._given.keys() & OF_MODEL.keys():
            detail = f"neither model_name nor a size of a model; {len(models())} models are known by name"
            if self._others:
                detail = f"the script gives MaxText {self._others[0]}, which has the model: give that file, too"
            hint = f"megaplan import maxtext {self._others[0]} {self.name}" if self._others else "model_name=llama3.1-8b"
            self._errors.append(diagnostic("MP916", detail, Location(self.name), (hint,)))
            self.stop()
        if name == "default" or ("base_emb_dim" in self._given and not self._whole):
            return {}
        if name not in models():
            near = get_close_matches(str(name), models(), n=3) or list(models())[:3]
            detail = f"model_name = {name}; the sizes of {len(models())} models are known, and a file of others can be given: FILE.yml"
            self._errors.append(diagnostic("MP916", detail, Location(self.name, key="model_name"), [f"model_name={one}" for one in near]))
            raise self.refusal()
        found = models()[name]
        if self._whole:  # base.yml has defaults of the model's keys, which its file replaces
            self._given = {key: value for key, value in self._given.items() if key not in found or value != DEFAULTS.get(key)}
        return dict(found)

    def _check_keys(self) -> None:
        unknown = []
        for key, value in self._given.items():
            if isinstance(value, str) and "$" in value and key in DEFAULTS and key != "run_name":
                self.wrong(key, "a value, and no variable of a shell")
            if key in REFUSED:
                neutral, why = REFUSED[key]
                if value not in (neutral, None, False) and value != -1:
                    self.refuse(key, why, f"{key}={json.dumps(neutral)}")
            elif key not in DEFAULTS and key not in IGNORED and not self._whole:
                near = get_close_matches(key, DEFAULTS, n=1, cutoff=0.9)
                if near or self._policy.strict:
                    hints = (*near, f"--ignore {key}")
                    self._errors.append(diagnostic("MP913", f"{key} = {json.dumps(value, default=str)}", self._at(key), hints))
                else:
                    unknown.append(key)
        if unknown:
            self.say(f"not read, for it changes no tensor that is priced: {', '.join(unknown)}")

    def value(self, key: str) -> Any:
        """The value of a key, or MaxText's default."""
        found = self.values.get(key)
        if found is None and key not in TENSORS:
            self._defaulted.append(key)
        return DEFAULTS[key] if found is None else found

    def whole(self, key: str, least: int = 1) -> int:
        """An integer from `least` on; 4.0 is one, too."""
        if isinstance(found := self.values.get(key), float) and found.is_integer():
            self.values[key] = int(found)
        return super().whole(key, least)

    def choice(self, key: str, choices: Mapping[str, Any]) -> Any:
        """The value that one of some words means; a truth value or a number is the word of it."""
        found = str(self.value(key))
        if found not in choices:
            self.wrong(key, " or ".join(each or '""' for each in choices))
            return next(iter(choices.values()))
        return choices[found]

    def stop(self) -> NoReturn:
        """Raises everything that was wrong so far."""
        raise self.refusal()

    def finish(self) -> list[Diagnostic]:
        """The note about assumptions.

        Raises:
            MegaplanError: Everything that was wrong: MP913, MP914, MP916.
        """
        if self._errors:
            self.stop()
        detail = "\n".join([*self._said, f"absent keys have the defaults of base.yml: {self._absent}"])
        return [diagnostic("MP919", detail, Location(self.name), severity=Severity.NOTE)]


def _words(text: str) -> Iterator[tuple[str, Any]]:
    """Names and values of `key=value` words; a value is read as YAML reads it."""
    for match in WORD.finditer(text):
        value = match[2].strip("\"'")
        try:
            found = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            found = value
        yield match[1], float(found) if isinstance(found, str) and re.fullmatch(r"\d+(\.\d+)?e-?\d+", found) else found
