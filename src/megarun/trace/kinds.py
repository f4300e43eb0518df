"""Kinds of storages, and the budget column of each kind."""

from enum import IntEnum

from megaplan.columns import Column


class Kind(IntEnum):
    """Kinds of storages by priority: a parameter that is also saved for backward is a parameter."""

    PARAMETER = 0
    OPTIMIZER_STATE = 1
    GATHERED_PARAMETER = 2
    RECEIVE_BUFFER = 3
    GRADIENT = 4
    INPUT = 5
    LIBRARY = 6
    ROUTED = 7
    COLLECTIVE = 8
    SCRATCH = 9
    WORKING = 10

    @property
    def label(self) -> str:
        """The kind as text."""
        return self.name.lower().replace("_", " ")


COLUMNS: dict[Kind, Column] = {
    Kind.GATHERED_PARAMETER: Column.COMMUNICATION,
    Kind.RECEIVE_BUFFER: Column.COMMUNICATION,
    Kind.GRADIENT: Column.GRADIENTS,
    Kind.INPUT: Column.ACTIVATIONS,
    Kind.LIBRARY: Column.WORKSPACE,
    Kind.ROUTED: Column.ROUTING,
    Kind.COLLECTIVE: Column.COMMUNICATION,
    Kind.SCRATCH: Column.WORKSPACE,
    Kind.WORKING: Column.ACTIVATIONS,
}
"""Columns of all kinds except the two that the inventory decides: parameters by owner rule, optimizer state by group."""
