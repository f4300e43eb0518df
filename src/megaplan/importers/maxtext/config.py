"""`MaxTextConfig`: files and arguments of a MaxText run while they are read.

Later files and arguments override earlier ones, and all override the model's own file, as in `pyconfig.py`.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.hosts.maxtext.policies import TENSORS
from megaplan.importers.maxtext.keys import DEFAULTS, IGNORED, OF_TRAINING, REFUSED, SCALE
from megaplan.importers.maxtext.model import DEFAULTS as OF_MODEL
from megaplan.importers.maxtext.model import models
from megaplan.importers.maxtext.script import XPK, number_of, training_words, words
from megaplan.importers.primus import modules_of, read_module
from megaplan.importers.program_config import ProgramConfig
from megaplan.importers.structure import Policy
from megaplan.spec.comments import SECTION, settings_of_section
from megaplan.spec.document import parse_document
from megaplan.spec.read import display_name, folders_above, read_text

OTHER_FILE = re.compile(r"[\w./${}-]*?([\w.-]+\.ya?ml)\b")
BASE = "base.yml"
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
_MOST_SCALE = 2**20
WHOLE = 300
"""Number of keys from which a file counts as a complete base.yml, so that unknown keys are expected."""


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
            MegaplanError: MP916: a file is not MaxText's. Also errors of reading a file.
        """
        super().__init__("arguments", policy)
        self.settings: list[str] = []
        self._others: list[str] = []
        self._starts_base = False
        self._bases: list[Path] = []
        given: dict[str, Any] = {}
        files = [text for text in inputs if "=" not in text]
        for text in inputs:
            given |= self._of_file(text) if text in files else dict(words(text))
        if files:
            self.name = display_name(files[0])
        self._folders = [Path(file).parent / "models" for file in files] + self._bases
        self._given = {key: value for key, value in given.items() if key not in self._policy.ignored}
        self._whole = len(self._given) > WHOLE
        self._check_variables()
        self.values = {**self._of_model(), **self._given}
        self._scale_sizes()
        self._check_keys()
        self._check_types()

    def _of_file(self, name: str) -> dict[str, Any]:
        """Values of YAML, or the arguments in the text of a script."""
        text = read_text(name)
        stated = _keys_of(text, name)
        if any(key in DEFAULTS for key in stated):
            self.settings += settings_of_section(stated.pop(SECTION, None) or {})
            return {str(key): number_of(value) for key, value in stated.items()}
        found, whole, said = training_words(text, display_name(name))
        if not any(key in DEFAULTS for key in found):
            at, hint = Location(display_name(name)), "megaplan import maxtext base.yml model_name=…   # with the run's own key=value"
            raise MegaplanError([diagnostic("MP916", "no key of MaxText, in YAML or as key=value", at, (hint,))])
        options = {key: match[1] for key, pattern in XPK.items() if (match := pattern.search(text))}
        if said:
            self.say(f"{display_name(name)}: {said}")
        self._bases += _folders_of_models(text, name)
        named = OTHER_FILE.findall(text)
        self._others += [other for other in named if other != BASE]
        self._starts_base = self._starts_base or BASE in named
        known = {key: value for key, value in found.items() if whole or key in DEFAULTS or key in REFUSED}
        return options | {key: value for key, value in known.items() if key != "run_name"}

    def _say_base(self) -> None:
        """Says that a script which names base.yml alone has the model of that file, and refuses other inputs without a model."""
        if self._starts_base and not self._others:
            self.say(
                f"neither model_name nor sizes are given: the model is the default of {BASE}, with "
                f"{OF_MODEL['base_num_decoder_layers']} layers"
            )
            return
        detail = f"neither model_name nor a size of a model; {len(models())} models are known by name"
        if self._others:
            detail = f"the script gives MaxText {self._others[0]}, which has the model: give that file, too"
        hint = f"megaplan import maxtext {self._others[0]} {self.name}" if self._others else "model_name=llama3.1-8b"
        self._errors.append(diagnostic("MP916", detail, Location(self.name), (hint,)))
        self.stop()

    def _of_model(self) -> dict[str, Any]:
        """Keys of the file of the model that is named; none for the default model, or if base.yml has the model's own values."""
        name = self._given.get("model_name", "default")
        if name == "default" and not self._whole and not self._given.keys() & {SCALE, *OF_MODEL}:
            self._say_base()
        if name == "default" or ("base_emb_dim" in self._given and not self._whole):
            return {}
        if name == "":
            hint = f"megaplan import maxtext {self.name} model_name=llama3.1-8b"
            said = "model_name is empty: the script takes it from a variable that nothing sets"
            self._errors.append(diagnostic("MP916", said, Location(self.name, key="model_name"), (hint,)))
            raise self.refusal()
        found = self._of_own_file(str(name)) or models().get(name)
        if found is None:
            near = [f"model_name={one}" for one in get_close_matches(str(name), models(), n=2, cutoff=0.9)]
            detail = f"model_name = {name}; {len(models())} models are known, and the file of another can be given: configs/models/NAME.yml"
            hints = [*near, f"megaplan import maxtext {self.name} configs/models/{name}.yml"]
            self._errors.append(diagnostic("MP916", detail, Location(self.name, key="model_name"), hints))
            raise self.refusal()
        if self._whole:  # base.yml has defaults for the model's keys, which the model's own file replaces
            self._given = {key: value for key, value in self._given.items() if key not in found or value != DEFAULTS.get(key)}
        return dict(found)

    def _scale_sizes(self) -> None:
        """Multiplies the model's sizes by powers of two, alternately heads and inner width, the stream's width, and the number of layers.

        Source: `get_individual_scales` of `src/maxtext/configs/types.py`, AI-Hypercomputer/maxtext.
        """
        scale = self.values.get(SCALE, 1)
        if not isinstance(scale, int) or isinstance(scale, bool) or not 0 < scale <= _MOST_SCALE or scale & (scale - 1):
            self.wrong(SCALE, f"a power of two up to {_MOST_SCALE:,}")
            self.stop()
        turns, left = divmod(scale.bit_length() - 1, 3)
        inner = turns + (left > 0)
        by = {"base_num_decoder_layers": turns, "base_emb_dim": turns + (left > 1)}
        by |= dict.fromkeys(("base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_moe_mlp_dim"), inner)
        for key, power in by.items():
            size = self.values.get(key, OF_MODEL[key])
            if scale > 1 and isinstance(size, int) and size > 0:
                self.values[key] = size << power

    def _of_own_file(self, name: str) -> dict[str, Any]:
        """Keys of the model's own file, in MaxText's folder of models near the read file; empty if there is none."""
        path = next((folder / f"{name}.yml" for folder in self._folders if os.path.isfile(folder / f"{name}.yml")), None)
        held = self._model_of(str(path)) if path is not None and "/" not in name else {}
        self._given |= {key: value for key, value in held.items() if key in REFUSED and self._given.get(key) in (None, REFUSED[key][0])}
        return {key: number_of(value) for key, value in held.items() if key in DEFAULTS}

    def _model_of(self, path: str) -> dict[Any, Any]:
        """Keys of a model's own file.

        Raises:
            MegaplanError: MP916, the file is not valid YAML.
        """
        try:
            held = yaml.safe_load(read_text(path))
        except (yaml.YAMLError, RecursionError) as error:
            said = f"{path}, the file of the model, is not valid YAML: {str(error).splitlines()[0]}"
            raise MegaplanError([diagnostic("MP916", said, Location(path))]) from None
        return held if isinstance(held, dict) else {}

    def _check_variables(self) -> None:
        """Stops at values of a script that it takes from outside."""
        for key, value in list(self._given.items()):
            if not (isinstance(value, str) and "$" in value and key in DEFAULTS):
                continue
            if key in OF_TRAINING:
                del self._given[key]
                self.say(f"{key} = {value} is a variable that the script does not set, and is read as absent")
            elif key != "run_name":
                detail = f"{key} = {value}: the script does not set the variable"
                hint = f"megaplan import maxtext {self.name} {key}=…"
                self._errors.append(diagnostic("MP916", detail, self._at(key), (hint,)))
        if self._errors:
            self.stop()

    def _check_types(self) -> None:
        """Reports values of the model's keys that are of another type than MaxText's default, and stops at them."""
        for key, default in OF_MODEL.items():
            value = self.values.get(key)
            if value is not None and not _of_type(value, default):
                self.wrong(key, _KINDS[type(default)])
        if self._errors:
            self.stop()

    def _check_keys(self) -> None:
        unknown = []
        for key, value in self._given.items():
            if "teacher" in key and value:
                self.refuse(key, "the parameters and activations of a teacher are not priced", f"--ignore {key}   # to plan it without")
            elif key in REFUSED:
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
            self.say(f"not read, because it changes no priced tensor: {', '.join(unknown)}")

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
        """The value for one of some words; a truth value or a number is first converted to its word."""
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


def _folders_of_models(text: str, name: str) -> list[Path]:
    """Folders of models next to the base.yml that a script names, which is looked for in the folders above the script."""
    named = dict.fromkeys(match[0].rpartition("/")[0] for match in OTHER_FILE.finditer(text) if match[1] == BASE)
    above = folders_above(name) if named else []
    return [folder / base / "models" for base in named if "$" not in base for folder in above]


def _of_type(value: Any, default: Any) -> bool:
    """True if a value can be in the place of a default: any number for a number, as MaxText converts them."""
    if isinstance(default, bool) or not isinstance(default, int | float):
        return isinstance(value, type(default))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _keys_of(text: str, name: str) -> dict[str, Any]:
    """Keys of YAML, for a job of Primus also of its files; empty for a script."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    if modules_of(found):
        return read_module(parse_document(text, name), name, "maxtext").values
    return found if isinstance(found, dict) else {}
