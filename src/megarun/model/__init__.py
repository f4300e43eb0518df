"""Plain single-device modules, one file per block family; parallelism is applied from outside.

Module paths are the inventory's names. A block saves for backward only the saved sets of its operations (docs/reference/ops.md) and the
inputs of its linears: no tensor is stored as an attribute, and no block casts or copies an activation.
"""
