"""Split: where the stack is cut into pipeline stages, and how good that cut is."""
