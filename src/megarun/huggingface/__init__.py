"""Weights of Hugging Face models as checkpoints, and checkpoints as Hugging Face models.

`names` has one table for each `model_type`, `rules` turns it into tensors with shapes, `changes` moves values both ways, `files` reads and
writes safetensors, `convert` joins them. Values are moved, never computed: dtypes stay, and import and export are inverses bit by bit.
"""
