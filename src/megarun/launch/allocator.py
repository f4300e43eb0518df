"""The setting of torch's CUDA caching allocator: the job's environment, and the runtime's additions before CUDA starts.

torch reads the setting once, when its allocator is first used: from PYTORCH_ALLOC_CONF, else from PYTORCH_CUDA_ALLOC_CONF.

Source: c10/core/AllocatorConfig.h (`AcceleratorAllocatorConfig::instance`).
"""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Variables in the order in which torch looks; it reads only the first that is set."""
OPTION, BACKEND, ASYNC = "expandable_segments", "backend", "cudaMallocAsync"
TORCHS_DEFAULT, RUNTIME = "torch's default", "megarun"


@dataclass(frozen=True, slots=True)
class AllocatorSetting:
    """Settings of torch's allocator.

    Attributes:
        expandable_segments: True if segments grow in place; otherwise a new segment is allocated for each size that does not fit.
        source: Source of the setting: a variable of the environment, the runtime, or torch's default.
        raw: The full setting as torch reads it; empty without one.
    """

    expandable_segments: bool
    source: str
    raw: str

    @property
    def text(self) -> str:
        """The setting in one line."""
        state = "on" if self.expandable_segments else "off"
        return f"expandable segments {state} ({self.source}{f': {self.raw}' if self.raw else ''})"


def allocator_setting(environment: MutableMapping[str, str] | None = None) -> AllocatorSetting:
    """The setting that torch reads in an environment, this process's if None. It needs no torch."""
    values = os.environ if environment is None else environment
    name = next((name for name in VARIABLES if name in values), None)
    if name is None:
        return AllocatorSetting(False, TORCHS_DEFAULT, "")
    options = _options(values[name])
    if OPTION not in options or options.get(BACKEND) == ASYNC:
        return AllocatorSetting(False, name if options.get(BACKEND) == ASYNC else TORCHS_DEFAULT, values[name])
    return AllocatorSetting(options[OPTION].lower() == "true", name, values[name])


def set_allocator(planned: bool, environment: MutableMapping[str, str] | None = None) -> AllocatorSetting:
    """Set expandable segments as planned, unless the environment sets them; other options of the environment are kept.

    Call it before CUDA starts: torch reads the setting once.

    Args:
        planned: `host.expandable_segments` of the plan.
        environment: Variables to read and write; this process's if None.
    """
    values = os.environ if environment is None else environment
    found = allocator_setting(values)
    if found.source != TORCHS_DEFAULT or found.expandable_segments == planned:
        return found
    name = next((name for name in VARIABLES if name in values), VARIABLES[0])
    values[name] = ",".join([*([found.raw] if found.raw else []), f"{OPTION}:{planned}"])
    return AllocatorSetting(planned, RUNTIME, values[name])


def differs_from_plan(setting: AllocatorSetting, planned: bool) -> str | None:
    """One line for the log if an environment's setting is not the plan's."""
    if setting.expandable_segments == planned:
        return None
    return (
        f"{setting.source} sets {OPTION}:{setting.expandable_segments}, the plan has host.{OPTION} = {str(planned).lower()}: "
        "reserved memory differs from the plan's"
    )


def _options(raw: str) -> dict[str, str]:
    """Options of a setting by name; lists in brackets, which contain colons and commas, are not read here."""
    depth, words, word = 0, [], ""
    for sign in raw.replace(" ", ""):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and not depth:
            words.append(word)
            word = ""
        else:
            word += sign
    pairs = [found.partition(":") for found in [*words, word] if found]
    return {name: value for name, _, value in pairs}
