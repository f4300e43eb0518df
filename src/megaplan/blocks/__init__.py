"""Vocabulary of blocks: local sizes, operations with the storages they read and make, and work in FLOPs and bytes.

`families` and the parts outside the layers are written in these terms; hosts replay operations, the cost model adds work up.
"""
