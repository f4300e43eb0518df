"""The parts of a plan that the optional packages of `host.libraries` run, as text."""

from megakernels.libraries import FLASH4, LIBRARIES, LibraryName
from megaplan.families.attention.composition import PART, library_refusal
from megaplan.families.attention.variants import variant_of
from megaplan.inventory.tensors import Inventory
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec
from megaplan.wording import plural


def library_texts(spec: Spec, inventory: Inventory) -> dict[LibraryName, str]:
    """Text that says which operations each package of the plan runs, and which it does not support."""
    found: dict[LibraryName, str] = {}
    for name in spec.host.libraries:
        taken = _attention(spec, inventory) if name == FLASH4 else _products(spec)
        found[name] = f"{name} {LIBRARIES[name].version} {taken}"
    return found


def _attention(spec: Spec, inventory: Inventory) -> str:
    section, dims = spec.model.attention, local_dims(spec)
    layers = [index for index, block in enumerate(inventory.layers) if block.family == PART]
    if section is None or not layers:
        return "runs nothing: the model has no attention"
    refused: dict[str, int] = {}
    for index in layers:
        reason = library_refusal(dims, section, variant_of(section, index, index))
        if reason is not None:
            refused[reason] = refused.get(reason, 0) + 1
    taken = len(layers) - sum(refused.values())
    text = f"runs attention of {taken} of {plural(len(layers), 'layer')}, forward and backward, with sums in one order"
    rest = "; ".join(f"not of {count}: {reason}" for reason, count in refused.items())
    return f"{text}; {rest}" if rest else text


def _products(spec: Spec) -> str:
    if spec.optimizer.uses_muon and spec.newton_schulz_dtype.bytes == 2:
        return "runs Muon's symmetric products except the first and the last, which have a separate factor for each matrix"
    return "runs nothing: no matrix has Muon's steps in 16 bits"
