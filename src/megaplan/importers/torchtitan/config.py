"""`JobConfig`: a file of torchtitan's configuration while it is read."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.importers.primus import MARK as PRIMUS
from megaplan.importers.primus import read_module
from megaplan.importers.program_config import ProgramConfig
from megaplan.importers.structure import Policy, names_a_tensor, unknown_names
from megaplan.importers.torchtitan.keys import DEFAULTS, IGNORED, IGNORED_SECTIONS, MOVED, OF_2024, OF_2025, REFUSED, Age
from megaplan.importers.torchtitan.registry_file import CHUNKED_LOSS, STATED, Made, read_registry
from megaplan.spec.comments import SECTION, settings_of_section
from megaplan.spec.document import parse_document

FLOAT8_2024 = "float8.enable_float8_linear", "training.enable_float8_linear", "training.enable_fp8_linear", "training.fp8_linear"
ATTENTION = "model.attn_backend"
SECTIONS = tuple(sorted({f"{key.partition('.')[0]}." for key in (*DEFAULTS, *MOVED)}))
"""Beginnings of the keys of a job."""
ADAM = ("AdamW", "Adam")
WHOLE = "sdpa"
"""Backend of attention without masks."""
TOKENS, SEQUENCE = "training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length"
STEP_TOKENS, MICROBATCHES = "training.num_tokens_per_train_step", "parallelism.num_pp_microbatches"


class Launch(NamedTuple):
    """The arguments of a job's launch.

    Attributes:
        values: Values by dotted key, which replace the file's.
        said: Sentences about what was assumed of a script.
    """

    values: Mapping[str, Any]
    said: Sequence[str] = ()


class JobConfig(ProgramConfig):
    """Dotted keys of a file; every one is read, listed as irrelevant, or refused.

    Attributes:
        age: Version of torchtitan that the file is for.
        always_shards: True for a version that applies FSDP2 to one rank, too.
        values: Values by current names.
        stated: The model's configuration, if the file itself states it.
        settings: `KEY=VALUE` texts of the section that `megaplan export` writes.
        beyond: Reasons why the estimate of host torchtitan does not apply to the job.
    """

    defaults = DEFAULTS

    def __init__(
        self,
        text: str,
        name: str,
        function: str | None = None,
        policy: Policy | None = None,
        launch: Launch | None = None,
    ) -> None:
        """Read TOML, JSON as torchtitan saves it, a configuration in Python, or Primus's YAML of a job.

        Args:
            text: Text of the file.
            name: Name of the file in diagnostics; one that ends in `.py` is Python.
            function: Configuration of a Python file.
            policy: Policy for keys that the importer does not know.
            launch: Settings of the launch.

        Raises:
            MegaplanError: MP916 if it has another format, or is not a table; MP932 and MP933 of a Python file.
        """
        super().__init__(name, policy)
        self._unknown: list[str] = []
        self.beyond: list[str] = []
        is_python = name.endswith(".py")
        self.settings: list[str] = []
        given = read_registry(text, name, function) if is_python else self._parsed(text)
        if launch is not None:
            given |= launch.values
            self._said += launch.said
        self.stated: Made | None = given.pop(STATED, None) if is_python else None
        self._chunked = bool(given.pop(CHUNKED_LOSS, False))
        self.age = Age.CURRENT
        self.always_shards = is_python or text.lstrip().startswith("{")
        if not is_python:
            self.age = Age.TOML_2024 if given.keys() & OF_2024 else Age.TOML_2025 if given.keys() & OF_2025 else Age.CURRENT
        if isinstance(mode := given.pop("activation_checkpoint", None), str):
            given |= {"activation_checkpoint.mode": mode, "activation_checkpoint.selective_ac_option": "op"}
        self.low = any(bool(given.pop(key, False)) for key in FLOAT8_2024)
        fused = given.pop("optimizer.fused", self.age is not Age.TOML_2024)
        self.values = {MOVED.get(key, key): value for key, value in given.items() if key not in self._policy.ignored}
        self.values.setdefault("optimizer.implementation", "fused" if fused else "foreach")
        self._count_tokens()
        self._refuse_others()

    def _count_tokens(self) -> None:
        """Batch and sequence of a file that states tokens and microbatches instead (mid-2026)."""
        values = self.values
        if SEQUENCE in values:
            values["training.seq_len"] = values.pop(SEQUENCE)
        tokens, whole, count = (values.pop(key, None) for key in (TOKENS, STEP_TOKENS, MICROBATCHES))
        micro, step = self._rows(TOKENS, tokens), self._rows(STEP_TOKENS, whole) if whole != -1 else None
        if micro is not None:
            several = values.get("parallelism.pipeline_parallel_degree", 1) != 1
            values["training.local_batch_size"] = micro * (count if several and isinstance(count, int) else 1)
            values["parallelism.pipeline_parallel_microbatch_size"] = micro
        if step is not None:
            values["training.global_batch_size"] = step

    def _rows(self, key: str, tokens: Any) -> int | None:
        """Sequences of as many tokens; None without a number."""
        length = self.values.get("training.seq_len", DEFAULTS["training.seq_len"])
        if tokens is None:
            return None
        if all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in (tokens, length)) and tokens % length == 0:
            return int(tokens // length)
        detail = f"{key} = {tokens}, and it is a multiple of {SEQUENCE} = {length}"
        self._errors.append(diagnostic("MP916", detail, self._at(key)))
        return None

    def _parsed(self, text: str) -> dict[str, Any]:
        """Values by dotted key."""
        if PRIMUS.search(text):
            return dict(_dotted(read_module(parse_document(text, self.name), self.name, "torchtitan").values))
        try:
            found = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
            own = found.pop(SECTION, None) if isinstance(found, dict) else None
            self.settings = settings_of_section(own) if isinstance(own, dict) else []
            values = dict(_dotted(found)) if isinstance(found, dict) else None
        except (ValueError, RecursionError) as error:
            raise MegaplanError([diagnostic("MP916", f"no TOML or JSON: {error}", Location(self.name))]) from None
        if values is None:
            raise MegaplanError([diagnostic("MP916", "the file is not a table of sections", Location(self.name))])
        if values and not any(key.startswith(SECTIONS) for key in values):
            raise MegaplanError([diagnostic("MP916", f"no section of a job: {', '.join(SECTIONS)}", Location(self.name))])
        return values

    def _refuse_others(self) -> None:
        layers: list[str] = []
        for key, value in self.values.items():
            if key == "optimizer.param_groups" and _are_settings(value):
                continue
            if key in REFUSED:
                neutral, why = REFUSED[key]
                if value != neutral and not (value is None and not neutral):
                    self.refuse(key, why, f"{key.rpartition('.')[2]} = {json.dumps(neutral)}")
            elif key not in DEFAULTS and key not in IGNORED and not key.startswith(IGNORED_SECTIONS):
                if self._policy.strict or names_a_tensor(key.rpartition(".")[2], value) or _resembles(key):
                    self._errors.append(diagnostic("MP913", self._shown(key), self._at(key), (f"--ignore {key}",)))
                elif _is_of_model(key, value):
                    layers.append(key)
                else:
                    self._unknown.append(key)
        if layers:
            said = "\n".join(map(self._shown, layers)) + "\nunknown of a model: a fork's own layers may have other tensors"
            self._errors.append(diagnostic("MP913", said, self._at(layers[0]), (" ".join(f"--ignore {key}" for key in layers),)))

    def names(self, key: str) -> list[str]:
        """A list of texts."""
        found = self.value(key)
        if isinstance(found, str):  # as in 2025, when a string could replace a list
            return [name.strip() for name in found.split(",") if name.strip()]
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            self.wrong(key, "a list of texts")
            return []
        return found

    def unread(self, key: str, line: int) -> None:
        """Reports a value that only running the file gives (MP932)."""
        self._errors.append(diagnostic("MP932", f"{key} is made on line {line}", Location(self.name, line=line)))

    def finish(self) -> list[Diagnostic]:
        """The notes about assumptions and about keys that are not known.

        Raises:
            MegaplanError: Everything that was wrong: MP913, MP914, MP916.
        """
        if self._errors:
            raise self.refusal()
        chunks = "\nthe loss takes logits in chunks, and the estimate has them whole, which is more" if self._chunked else ""
        if (backend := self.values.get(ATTENTION, WHOLE)) != WHOLE:
            chunks += f"\n{backend} masks attention by document; the estimate has whole sequences, the same tensors and no less time"
        if (optimizer := self.values.get("optimizer.name", ADAM[0])) not in ADAM:
            chunks += f"\n{optimizer} is priced as AdamW"
        if self.values.get("optimizer.early_step_in_backward"):
            chunks += "\nthe optimizer takes each gradient in backward and frees it, and the estimate has them all, which is more"
        chunks += "".join(f"\n{each}" for each in self._said)
        detail = f"read as a file of torchtitan {self.age.value}{chunks}\nabsent keys have its defaults: {self._absent}"
        notes = [diagnostic("MP919", detail, Location(self.name), severity=Severity.NOTE)]
        return [*notes, *unknown_names(self._unknown, self.values, self._shown, self._at)]


def _are_settings(groups: Any) -> bool:
    """True if groups of parameters have other settings of Adam alone, which no tensor depends on."""
    found = groups if isinstance(groups, list) else []
    names = [each.given.get("optimizer_name") or ADAM[0] for each in found if isinstance(each, Made)]
    return bool(found) and len(names) == len(found) and all(name in ADAM for name in names)


def _is_of_model(key: str, value: Any) -> bool:
    """True if an unknown key is a switch that is on, a number or a list of the model, or is in a section inside it: a fork's layers."""
    return key.startswith("model.") and value not in (None, False, 0, [], "") and (key.count(".") > 1 or not isinstance(value, str))


def _resembles(key: str) -> bool:
    """True if a key is a misspelt name of a section that is read."""
    return bool(get_close_matches(key, DEFAULTS, cutoff=0.85))


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
