"""Weights of Hugging Face models as checkpoints, and checkpoints as Hugging Face models.

`names` has one table for each `model_type`, `rules` expands it to tensors with shapes, `changes` converts values both ways, `files` reads
and writes safetensors, `convert` combines them. Values are moved, never computed: dtypes stay, and import and export are inverses bit by
bit.
"""
