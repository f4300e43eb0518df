"""Names and groups of modules that torch-native hosts read: megarun's own, which the inventory has too."""

from typing import Any

from megaplan.exporters.values import Source

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


def stage_modules(source: Source) -> list[list[str]]:
    """Module names of each stage, in model order."""
    return [list(slot.blocks) for slot in source.slots()]


def optimizer_groups(source: Source) -> list[dict[str, Any]]:
    """Muon's and AdamW's tensors, by module pattern of the inventory, and tensors that no optimizer updates."""
    optimizer = source.spec.optimizer
    names: dict[str, list[str]] = {"matrix": [], "other": [], "frozen": []}
    for name, tensor in source.inventory.tensors():
        names[str(tensor.group)].append(name)
    if names["frozen"]:
        return [{"optimizer": "adamw", "parameters": names["other"]}, {"optimizer": None, "parameters": names["frozen"]}]
    if optimizer.matrix == "adamw":
        return [{"optimizer": "adamw", "parameters": [*names["matrix"], *names["other"]]}]
    steps, dtype = optimizer.newton_schulz_steps, TORCH_DTYPES[str(source.spec.newton_schulz_dtype)]
    return [
        {"optimizer": "muon", "newton_schulz_steps": steps, "newton_schulz_dtype": dtype, "parameters": names["matrix"]},
        {"optimizer": optimizer.other, "parameters": names["other"]},
    ]
