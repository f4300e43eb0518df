"""The families of blocks: a folder each, with everything that megaplan knows of a letter of the pattern.

`section.py` what a spec writes, `rules.py` what must fit, `tensors.py` parameters, `program.py` operations with the storages that they
read, make and keep, `work.py` FLOPs and bytes; the folder itself has the `Family` value that joins them. `registry.py` lists the families;
nothing else names one by its letter. The recipe for another is docs/recipes/family.md.
"""
