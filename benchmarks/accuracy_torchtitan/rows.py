"""Published runs of torchtitan as its own job files: what each row of a table states, on the preset file of its time.

What a table leaves open has torchtitan's default of that time; `sets` are keys of a spec for what no file says: the device, and what
changed between two versions that have the same keys.
"""

import json
from dataclasses import dataclass, field
from typing import Any

DECEMBER = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TRAINY = "pytorch/torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
AO = "pytorch/ao, docs/source/workflows/training.md"
CHUNKED = "pytorch/torchtitan, pull request 996, before the change"
EXPERTS = "pytorch/torchtitan, issue 1789"
QWEN = "pytorch/torchtitan, pull request 1690"
H100, H200, MI300X, B200 = (f"device.name={name}" for name in ("h100-sxm-500w", "h200", "mi300x", "b200"))
AUGUST_2025 = "host.fsdp_ends=separate"
"""Override for rows from July 2025 on, which have the same keys."""
HALVES = "host.checkpoints=halves"
"""Override for models with flex attention from 24 September to 8 December 2025, which have the same keys as before and after."""
ALMOST_96 = 75.9
"""GiB of the run that is said to use "almost 96 %" of 79.09 GiB."""

SHARED: dict[str, Any] = {
    "training.seq_len": 8192,
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
OF_2024: dict[str, Any] = {**SHARED, "model.name": "llama3", "model.flavor": "8B", "training.batch_size": 2, "training.compile": False}
OF_2025: dict[str, Any] = {
    **SHARED,
    "model.name": "llama3",
    "model.flavor": "8B",
    "training.local_batch_size": 1,
    "training.compile": True,
    "float8.filter_fqns": ["output"],
}
COMPILED = {"training.compile": True}
LOW_2024 = {"float8.enable_float8_linear": True, "float8.enable_fsdp_float8_all_gather": True}
LOW_2025 = {"model.converters": ["float8"], "float8.enable_fsdp_float8_all_gather": True}
ROWS_2025 = {"model.converters": ["float8"], "float8.recipe_name": "rowwise"}
FULL = {"activation_checkpoint.mode": "full"}
LARGE = {**COMPILED, **LOW_2024, **FULL}
WITH_70B = {**LARGE, "model.flavor": "70B", "training.tensor_parallel_degree": 8, "training.batch_size": 16}
WITH_405B = {
    **LARGE,
    "model.flavor": "405B",
    "training.tensor_parallel_degree": 8,
    "experimental.pipeline_parallel_degree": 8,
    "experimental.enable_async_tensor_parallel": True,
}


@dataclass(frozen=True, slots=True)
class Published:
    """A row of a table.

    Attributes:
        name: Name in the table.
        source: Repository and file.
        gib: Peak memory, as torch's largest reserved bytes.
        gpus: Number of the run's GPUs.
        keys: Keys of the job file.
        sets: `--set` of the import.
        fitted: True if `host.reserved_percent` is from this row; all others were held back.
    """

    name: str
    source: str
    gib: float
    gpus: int
    keys: dict[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = (H100,)
    fitted: bool = False

    @property
    def unseen(self) -> bool:
        """True if the row was estimated only after every formula was final."""
        return self.source != DECEMBER

    @property
    def job(self) -> str:
        """The job file as TOML."""
        sections: dict[str, list[str]] = {}
        for key, value in self.keys.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
        return "\n".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items())


def _one_dimension() -> list[Published]:
    found = []
    for gpus, memory in ((8, (82.4, 77.0, 76.8)), (128, (67.0, 62.0, 61.8))):
        steps = {"FSDP": {}, "FSDP, compile": COMPILED, "FSDP, compile, float8": {**COMPILED, **LOW_2024}}
        for (name, keys), gib in zip(steps.items(), memory, strict=True):
            found.append(Published(f"8B, {gpus} GPUs: {name}", DECEMBER, gib, gpus, {**OF_2024, **keys}, fitted=True))
    return found


def _contexts() -> list[Published]:
    found = []
    for cp, gib in ((1, 83.9), (2, 84.2), (4, 84.0), (8, 84.5)):
        keys = {"training.batch_size": 1, "training.seq_len": 32_768 * cp, "experimental.context_parallel_degree": cp}
        found.append(Published(f"8B, 8 GPUs: CP {cp}", DECEMBER, gib, 8, {**OF_2024, **LARGE, **keys}))
    for cp, gib in ((1, 75.3), (2, 75.9), (4, 77.1), (8, 84.9)):
        keys = {"training.batch_size": 8, "training.seq_len": 32_768 * cp, "experimental.context_parallel_degree": cp}
        found.append(Published(f"405B, 512 GPUs: TP 8, PP 8, CP {cp}", DECEMBER, gib, 512, {**OF_2024, **WITH_405B, **keys}))
    return found


def _large() -> list[Published]:
    asynchronous = {"experimental.enable_async_tensor_parallel": True}
    interleaved = {"experimental.pipeline_parallel_schedule": "Interleaved1F1B"}
    deep = {"training.batch_size": 32}
    return [
        Published("70B, 256 GPUs: TP 8", DECEMBER, 71.9, 256, {**OF_2024, **WITH_70B}),
        Published("70B, 256 GPUs: TP 8, async", DECEMBER, 67.6, 256, {**OF_2024, **WITH_70B, **asynchronous}),
        Published("405B, 512 GPUs: 1F1B", DECEMBER, 82.5, 512, {**OF_2024, **WITH_405B, **deep}),
        Published("405B, 512 GPUs: interleaved", DECEMBER, 72.7, 512, {**OF_2024, **WITH_405B, **deep, **interleaved}),
    ]


def _others() -> list[Published]:
    one, rowwise = {**OF_2024, "training.batch_size": 1}, "precision.recipe={name: fp8_rowwise}"
    two = {**OF_2025, **LOW_2025, "training.local_batch_size": 2}
    routed = {"model.name": "deepseek_v3", "model.flavor": "16B", "training.local_batch_size": 4, "training.seq_len": 4096}
    routed |= {"compile.enable": True, "compile.components": ["loss"]}
    spread, double = {"parallelism.expert_parallel_degree": 8}, {"training.local_batch_size": 8}
    of_october = ("device.name=h100-sxm", HALVES)
    found = [
        Published("8B, 8 GPUs: batch 1", CHUNKED, 49.58, 8, one),
        Published("8B, 32 H200: float8", TRAINY, 47.96, 32, two, (H200,)),
        Published("8B, 64 H200: float8", TRAINY, 46.97, 64, two, (H200,)),
        Published("8B, 8 H100: compile", AO, 47.65, 8, {**one, **COMPILED}),
        Published("8B, 8 H100: tensorwise", AO, 47.77, 8, {**one, **COMPILED, **LOW_2024}),
        Published("8B, 8 H100: rowwise", AO, 47.79, 8, {**one, **COMPILED}, (H100, rowwise)),
        Published("DeepSeek-V3 16B, 8 H100: EP 8", EXPERTS, 73.32, 8, {**SHARED, **routed, **spread}, of_october),
        Published("DeepSeek-V3 16B, 8 H100: EP 1, batch 8", EXPERTS, ALMOST_96, 8, {**SHARED, **routed, **double}, of_october),
    ]
    qwen = {**SHARED, **FULL, "model.name": "qwen3", "model.flavor": "32B", "training.seq_len": 4096}
    qwen |= {"compile.components": ["model", "loss"]}
    batches = ((8, 1, 8, 2, 81.85), (32, 8, 4, 16, 43.45), (32, 8, 4, 32, 70.79), (64, 8, 8, 32, 63.27))
    for gpus, tp, shard, batch, gib in batches:
        keys = {"training.local_batch_size": batch, "compile.enable": tp == 1}
        keys |= {"parallelism.data_parallel_shard_degree": shard, "parallelism.tensor_parallel_degree": tp}
        found.append(Published(f"Qwen3 32B, {gpus} GPUs: TP {tp}, batch {batch}", QWEN, gib, gpus, {**qwen, **keys}))
    for device, memory in ((MI300X, (39.09, 39.07, 39.32)), (B200, (33.71, 33.38, 33.72))):
        kinds = {"compile": {}, "tensorwise": LOW_2025, "rowwise": ROWS_2025}
        for (name, keys), gib in zip(kinds.items(), memory, strict=True):
            title = f"8B, 8 {device.rpartition('=')[2].upper()}: {name}"
            found.append(Published(title, AO, gib, 8, {**OF_2025, **keys}, (device, AUGUST_2025)))
    return found


ROWS: tuple[Published, ...] = (*_one_dimension(), *_contexts(), *_large(), *_others())
"""Every row of torchtitan's tables that states a peak, and others that do."""
