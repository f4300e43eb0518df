"""The best layouts of a model on given devices: every legal one is in the space, and bounds leave out those that cannot win.

`space` lists layouts and policies, `clock` times them, `bounds` says what none can be below, `evaluate` gives exact values, and `engine`
goes through the space in the order of the bounds.
"""
