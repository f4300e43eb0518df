"""The best layouts of a model on given devices: the space has every legal layout, and bounds exclude layouts that cannot win.

`space` lists layouts and policies, `clock` times them, `bounds` gives lower limits, `evaluate` gives exact values, and `engine` traverses
the space in the order of the bounds.
"""
