"""Facts of the scaled square."""

from __future__ import annotations

SQUARE_TILE = 128
"""Elements of a tile."""
