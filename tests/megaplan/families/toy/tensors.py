"""Parameters of T blocks."""

from megaplan.families.toy.section import Toy

from megaplan.inventory.makers import column, norm, row
from megaplan.inventory.tensors import ParamTensor


def toy_tensors(toy: Toy, hidden_size: int, _variant: None = None) -> tuple[ParamTensor, ...]:
    """Tensors of one T block, its pre-norm included."""
    return norm("norm.weight", hidden_size), column("down.weight", toy.rank, hidden_size), row("up.weight", hidden_size, toy.rank)
