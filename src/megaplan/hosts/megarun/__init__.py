"""Host megarun: what its modules, FSDP2 wrappers, pipeline stages and optimizers keep in memory.

`ledger.py` is the entry for activations; one file a block family beside it, under the names of `megaplan/inventory/`. A block is written
as data (`program.py`): its operations in order, what each reads, makes and keeps. Saved sets and working sets are replayed from that,
never estimated. `storage.py`, `boundaries.py`, `optimizer.py` and `buffers.py` hold what lives outside the blocks.
"""
