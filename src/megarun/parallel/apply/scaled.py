"""`precision.recipe`: the linears and the banks of experts of the layers that it covers, and the head, multiply in eight bits.

Which linears share a call, and what each call and each bank saves, follows the ledger (`megaplan.hosts.megarun.scaled`,
`scaled_experts`).
"""

from functools import partial

from torch import Tensor, nn

from megakernels.ops.fp8_linear.facts import DELAYED
from megaplan.hosts.megarun.ledger import attends_in_eight_bits, bank_keeps_copy, layer_calls
from megaplan.inventory.tensors import Inventory
from megaplan.low_precision import FORMATS, SCALINGS
from megaplan.spec.local import BANKS, delayed_weights
from megaplan.spec.low_precision import LowPrecision
from megaplan.spec.models import Spec
from megarun.model.attention import GroupedQueryAttention, LatentAttention
from megarun.model.moe import ExpertBlock
from megarun.model.norm import RowLinear
from megarun.model.stage import Stage
from megarun.parallel.groups.delayed import DelayedNumbers
from megarun.parallel.groups.scaled import Scaling, multiply
from megarun.parallel.groups.scaled_experts import BankScaling
from megarun.parallel.groups.tensor import ALONE

GRADIENT_FORMATS = {"hybrid": "e5m2", "e4m3": "e4m3"}
BANK_FORMAT, BANK_WEIGHTS = "e4m3", ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
"""Format of the gradients of banks' outputs, and the matrices of a bank in the order of its products."""


def scale_products(stage: Stage, spec: Spec, inventory: Inventory) -> None:
    """Make linears and banks of a stage's layers multiply by the spec's recipe; parameters and their names do not change."""
    recipe = spec.precision.recipe
    if recipe is None:
        return
    by = SCALINGS[recipe.name]
    gradient_format = GRADIENT_FORMATS[recipe.format or FORMATS.get(recipe.name, "e4m3")]
    stage.delayed = _delayed_numbers(stage, spec, inventory, recipe, gradient_format) if by == DELAYED else None
    numbers = {} if stage.delayed is None else stage.delayed.of
    if recipe.head and stage.predicts:
        # as wide as the vocabulary, so its weight gradient is not deferred
        stage.head_scaling = Scaling(by, gradient_format, keeps_low=False, may_wait=False, numbers=numbers.get("head.weight"))
    for name, block in stage.layers.items():
        if isinstance(block, GroupedQueryAttention | LatentAttention) and attends_in_eight_bits(
            spec, int(name), inventory.layers[int(name)].family
        ):
            block.low_gradients = gradient_format
        keeps_copy = bank_keeps_copy(spec, inventory, int(name))
        if keeps_copy is not None:
            assert isinstance(block, ExpertBlock)
            of_bank = [numbers[each] for weight in BANK_WEIGHTS if (each := f"layers.{name}.{weight}") in numbers]
            block.experts.gathers, block.experts.scaling = True, BankScaling(by, keeps_copy, tuple(of_bank))
        if isinstance(block, LatentAttention) and block.late is not None and spec.multiplies_in_eight_bits(int(name), "A"):
            own = Scaling(by, gradient_format, keeps_low=False, may_wait=False, numbers=numbers.get(f"layers.{name}.kv_up.weight"))
            block.kv_up.scaling = own  # type: ignore[assignment]  # the block's attention core reads it
        for call in layer_calls(spec, inventory, int(name)):
            for weight in call.weights:
                module = block.get_submodule(weight.removesuffix(".weight"))
                assert isinstance(module, nn.Linear)
                scaling = Scaling(by, gradient_format, call.keeps_low, numbers=numbers.get(f"layers.{name}.{weight}"))
                module.scaling = scaling  # type: ignore[assignment]  # `project` reads it
                module.forward = partial(_forward, module, scaling)  # type: ignore[method-assign]


def _delayed_numbers(stage: Stage, spec: Spec, inventory: Inventory, recipe: LowPrecision, gradient_format: str) -> DelayedNumbers:
    """Numbers of a stage's products, by blocks."""
    found = DelayedNumbers(recipe)
    for block in (*(f"layers.{name}" for name in stage.layers), *(("head",) if stage.predicts else ())):
        weights = delayed_weights(spec, inventory, block)
        found.add(block, {name: BANK_FORMAT if name in BANKS else gradient_format for name in weights})
    return found


def _forward(module: nn.Linear, scaling: Scaling, x: Tensor) -> Tensor:
    bias = module.own_bias if isinstance(module, RowLinear) else module.bias
    return multiply(ALONE, [scaling], x, [module.weight], [bias])[0]
