"""A faster constructor of named tuples, for evaluations that make hundreds."""

new = tuple.__new__
"""`new(Class, (…))` makes a tuple from all fields in order: the core of the class's own constructor, in half its time."""
