"""The families of blocks: one folder each, with everything that megaplan knows about a letter of the pattern.

`section.py` has the keys of a spec, `rules.py` the rules, `tensors.py` the parameters, `program.py` the operations with the storages that
they read, make and keep, `composition.py` the operations with their facts; the folder itself has the `Family` value that joins them.
`registry.py` lists the families; nothing else names one by its letter. The recipe for a new one is docs/recipes/family.md.
"""
