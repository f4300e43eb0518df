"""`equal`: the same number of layers on every slot."""

from __future__ import annotations


def equal_cuts(num_layers: int, num_slots: int) -> tuple[int, ...]:
    """Cuts that give every slot num_layers div num_slots layers, and the remainder one each to the inner slots.

    The edge stages take fewer (R-23), because embeddings, head, MTP and loss are work too. The remainder goes to slots 1, 2, … up to the
    one before the last, in order, then to slot 0; the last slot never takes one. 10 layers on 4 slots: 2, 3, 3, 2.

    Raises:
        ValueError: If there are fewer layers than slots.
    """
    if not 0 < num_slots <= num_layers:
        raise ValueError(f"{num_layers} layers cannot fill {num_slots} slots")
    share, rest = divmod(num_layers, num_slots)
    takers = set([*range(1, num_slots - 1), 0][:rest])
    cuts, reached = [], 0
    for slot in range(num_slots - 1):
        reached += share + (slot in takers)
        cuts.append(reached)
    return tuple(cuts)
