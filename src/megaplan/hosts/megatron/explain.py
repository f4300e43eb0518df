"""The blocks of a pipeline rank, and the tensors that Megatron-Core's operators keep, for `estimate --explain`."""

from megaplan.hosts.megarun.explain import explain as of_families
from megaplan.hosts.megatron.pattern import operators, plain
from megaplan.hosts.megatron.run import MegatronRun
from megaplan.hosts.values import Explained
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout
from megaplan.spec.models import Spec


def explain(spec: Spec, inventory: Inventory, layout: Layout, pp_rank: int) -> Explained:
    """The blocks of a pipeline rank of the layout have the families' parameters; each operator keeps its own tensors."""
    run = MegatronRun(spec, inventory)
    own, kept = operators("".join(run.chunks(layout, pp_rank))), []
    for letter in dict.fromkeys(own):
        sizes = sorted(run.operator(letter).tensors.items(), key=lambda item: (-item[1], item[0]))
        rows: list[tuple[str, ...]] = [(name, f"{size:,}") for name, size in sizes]
        skew = "" if run.skew(letter) is None else f" of skew {run.skew(letter):g}"
        kept.append((f"{plain(letter)}{skew}, {own.count(letter)} on this rank", sum(size for _, size in sizes), rows))
    return Explained(of_families(spec, inventory, layout, pp_rank).held, ("tensor", "bytes"), kept)
