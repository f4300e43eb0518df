"""Facts of the scaled square."""

SQUARE_TILE = 128
"""Elements of a tile."""
