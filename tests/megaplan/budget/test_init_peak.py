"""The peak of building slots that have many layers of one kind."""

import random
from itertools import product
from pathlib import Path

import pytest

from megaplan.budget.init import SlotInit, init_peak
from megaplan.hosts.megarun.sizes import Uneven, storage_sizes
from megaplan.hosts.megarun.storage import BlockStorage, Shard, block_storage
from megaplan.hosts.megarun.towers import RotaryTable
from megaplan.inventory.build import build_inventory
from megaplan.spec.load import load_spec

RANKS = 4
SPEC = Path(__file__).parents[3] / "plans/tiny-hybrid.yaml"


def kind(draw: random.Random, base: BlockStorage) -> BlockStorage:
    """A block of one to five tensors, some of whose last chunks are short or empty."""
    shards, resident = [], [0, 0, 0]
    for _ in range(draw.randrange(1, 6)):
        rows, row_bytes, expert, column = draw.randrange(1, 9), draw.choice((2, 4, 100)), draw.random() < 0.4, draw.randrange(3)
        chunk = -(-rows // RANKS)
        uneven = Uneven(rows, chunk, RANKS, 8, row_bytes, expert, matrix=False) if rows % RANKS else None
        shards.append(Shard(column, chunk * row_bytes, expert, uneven))
        resident[column] += chunk * row_bytes
    replicated, tensor_parallel, expert_parallel = resident
    total = replicated, tensor_parallel, expert_parallel
    return base._replace(resident_bytes=total, shards=tuple(shards) if any(shard.uneven for shard in shards) else ())


@pytest.mark.parametrize("seed", range(60))
def test_layers_of_one_kind_are_as_layers_one_by_one(seed: int) -> None:
    """Only the last layer of a kind is examined; equal layers that are separate objects are all examined."""
    draw, spec = random.Random(seed), load_spec(str(SPEC), ()).spec
    base = block_storage(storage_sizes(spec), build_inventory(spec).layers[0])
    kinds = [kind(draw, base) for _ in range(draw.randrange(1, 4))]
    slots, apart = [], []
    for _ in range(draw.randrange(1, 3)):
        storages = [draw.choice(kinds) for _ in range(draw.randrange(1, 8))]
        layers = [draw.random() < 0.8 for _ in storages]
        replicated, tensor_parallel, expert_parallel = (sum(each) for each in zip(*[one.resident_bytes for one in storages], strict=True))
        slot = SlotInit(
            (replicated, tensor_parallel, expert_parallel),
            storages,
            layers,
            draw.randrange(50),
            draw.choice(((), (RotaryTable(8, 30), RotaryTable(4, 20)))),
        )
        slots.append(slot)
        apart.append(slot._replace(storages=[storage._replace() for storage in storages]))
    for place in product(range(RANKS), range(RANKS)):
        assert init_peak(slots, *place) == init_peak(apart, *place)
