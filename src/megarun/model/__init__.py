"""The blocks, one file per family, and the stage.

Blocks call the collectives of `megarun.parallel.groups`; recompute, compilation, FSDP2 and the schedule are applied to a built stage by
`megarun.parallel.apply`.

Module paths are the inventory's names. A block saves for backward only the saved sets of its operations (docs/reference/ops.md) and the
inputs of its linears: no tensor is stored as an attribute, and no block casts or copies an activation.
"""
