"""Facts of the norm of each head times its activated gate."""

HEAD_LARGEST_WIDTH = 1024
"""Maximum width of a head; wider ones use the reference."""
HEAD_TILE_ELEMENTS = 1024
"""Elements of a tile."""
UNALIGNED_ELEMENTS = 512
"""Elements of a tile of rows that are not a multiple of 16 elements, which are read one at a time: their addresses take registers."""
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs of the backward per multiprocessor."""
