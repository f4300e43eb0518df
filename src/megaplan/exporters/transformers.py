"""Models of hosts that build only transformers: blocks of attention with an MLP, or with experts."""

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.exporters.values import Loss, Source
from megaplan.families.registry import FAMILIES
from megaplan.spec.models import GroupedQueryAttention


def transformer_layers(source: Source, host: str, blocks: tuple[str, ...]) -> int:
    """Blocks of the model, each an A and the letter after it.

    Args:
        source: The plan.
        host: Name of the host, for the diagnostic.
        blocks: Pairs of letters that the host's models have; all blocks of a model are equal.

    Raises:
        MegaplanError: MP921 if the host has no such model.
    """
    letters = source.letters
    found = {letters[index : index + 2] for index in range(0, len(letters), 2)}
    attention = source.spec.model.attention
    why = None
    if len(found) != 1 or not found <= set(blocks):
        kinds = ", ".join(f"{count} {letter}" for letter in FAMILIES if (count := letters.count(letter)))
        why = f"layers are {kinds}; {host} builds {' or '.join(blocks)} blocks, all equal"
    elif not isinstance(attention, GroupedQueryAttention):
        why = f"model.attention.kind = mla, and {host}'s config has grouped-query attention"
    if why is not None:
        raise MegaplanError([diagnostic("MP921", why, Location(key="model.pattern"), ("megaplan export PLAN --to megatron",))])
    return len(letters) // 2


def uneven_stages(source: Source, host: str) -> list[Loss]:
    """Loss for cuts on hosts that decide them themselves."""
    sizes = [slot.stop - slot.start for slot in source.slots()]
    if len(set(sizes)) == 1 and not any(size % 2 for size in sizes):
        return []
    detail = f"stages of {', '.join(map(str, sizes))} layers: {host} gives every stage the same number of blocks"
    return [Loss("split", detail, "split: {mode: equal}")]
