"""Host megarun: what its modules, FSDP2 wrappers, pipeline stages and optimizers keep in memory.

`ledger.py` is the entry for activations: it replays the operations that a family (`megaplan/families`) or a part outside the layers states
(`embedding.py`, `features.py`). Saved sets and working sets are replayed from those (`program.py`), never estimated. `storage.py`,
`boundaries.py`, `optimizer.py` and `buffers.py` hold what lives outside the blocks.
"""
