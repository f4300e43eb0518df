"""The transformer blocks of a pipeline rank, and the tensors of their ledgers, for `estimate --explain`."""

from megaplan.hosts.megarun.explain import explained
from megaplan.hosts.torchtitan.blocks import in_blocks, transformer_blocks
from megaplan.hosts.torchtitan.ledger import block_ledger, block_variants
from megaplan.hosts.values import Explained
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout
from megaplan.spec.models import Spec


def explain(spec: Spec, inventory: Inventory, layout: Layout, pp_rank: int) -> Explained:
    """The blocks of a pipeline rank of the layout."""
    blocks = transformer_blocks(inventory)
    slots, variants = map(in_blocks, layout.of_rank(pp_rank)), block_variants(spec, blocks)
    return explained(spec, blocks, slots, variants, lambda *block: block_ledger(*block[:3]))
