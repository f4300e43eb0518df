"""Plain single-device modules, one file a block family; parallelism is applied from outside.

Module paths are the inventory's names. A block keeps for backward what its operations' saved sets list (docs/reference/ops.md) and the
inputs of its linears, nothing else: no tensor is stored as an attribute, and no block casts or copies an activation.
"""
