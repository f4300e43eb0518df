"""Properties of the program of every block, whatever the plan."""

from random_plans.choices import SMALL
from random_plans.draw import draw

from megaplan.budget.megarun import slot_chunks
from megaplan.errors import MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import spec_from_document

NUM_PLANS = 400
ENOUGH = 300


def test_a_whole_backward_frees_everything_that_was_kept() -> None:
    """A storage that waits for an operation which the program does not have would be counted to the end of the backward."""
    left, seen = set[str](), 0
    for seed in range(NUM_PLANS):
        try:
            spec = spec_from_document(draw(seed, size=SMALL))
            inventory = build_inventory(spec)
            if spec.host.name != "megarun":
                continue
            layout = build_layout(spec, inventory, choose_cuts(spec, inventory).spans)
        except MegaplanError:
            continue
        seen += 1
        for chunk in slot_chunks(spec, inventory, layout):
            for name, unit in zip(chunk.names, chunk.units, strict=True):
                replay = unit.block.part.replay
                stays = set(replay.backward[-1].storages) - {replay.program.pinned}
                left |= {f"seed {seed}, {name}: {', '.join(sorted(stays))}"} if stays else set()
    assert not left, "\n".join(sorted(left))
    assert seen >= ENOUGH
