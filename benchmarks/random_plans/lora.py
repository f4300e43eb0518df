"""`lora` of a random plan of megarun, where nothing of it is refused with adapters."""

from typing import Any

from pydantic import ValidationError

from megaplan.errors import Severity
from megaplan.inventory.adapters import adaptable
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses
from megaplan.spec.rules import check_rules
from random_plans.choices import Draw, Scope

SHARE, RUNTIME_SHARE = 0.06, 0.15


def add_lora(draw: Draw, sections: dict[str, Any], scope: Scope) -> None:
    """Add adapters with some probability; a spec that refuses them, or that was refused before, stays as it is."""
    if not draw.chance(SHARE if scope is Scope.ANY else RUNTIME_SHARE) or sections.get("host", {}).get("name") == "megatron":
        return
    try:
        spec = Spec.model_validate(sections)
        if any(found.severity is Severity.ERROR for found in check_rules(spec)):
            return
    except ValidationError:
        return
    linears = sorted(
        {(block.family, name) for block in build_inventory(spec).layers for each in block.tensors if (name := adaptable(each))}
    )
    if not linears:
        return
    lora: dict[str, Any] = {"rank": draw.randint(1, 24), "alpha": draw.choice([1.0, 16.0, 32.5])}
    draw.maybe(lora, 0.5, families=lambda: _named(draw, linears))
    draw.maybe(lora, 0.4, dtype=lambda: str(draw.choice([spec.precision.params, spec.precision.master])))
    if lora.get("dtype") == "fp8":
        del lora["dtype"]
    changed = Spec.model_validate(sections | {"lora": lora})
    if not any(found.severity is Severity.ERROR for found in check_rules(changed)):
        sections["lora"] = lora


def add_base(draw: Draw, sections: dict[str, Any]) -> None:
    """Pack the frozen weights of half of the plans with adapters, where their columns have whole blocks on every rank."""
    if "lora" not in sections or not draw.chance(0.5):
        return
    base: dict[str, Any] = {"base": draw.choice(["nf4", "int8"]), "base_block": draw.choice([4, 8, 32, 64, 256])}
    draw.maybe(base, 0.4, double_quant=lambda: False)
    for block in (base["base_block"], 4):
        lora = sections["lora"] | base | {"base_block": block}
        changed = Spec.model_validate(sections | {"lora": lora})
        if not any(found.severity is Severity.ERROR for found in check_rules(changed)) and not megarun_refuses(changed):
            sections["lora"] = lora
            return


def _named(draw: Draw, linears: list[tuple[str, str]]) -> list[str]:
    """Draw some letters of families, or names of some linears."""
    letters = sorted({letter for letter, _ in linears})
    if draw.chance(0.4):
        return draw.sample(letters, draw.randint(1, len(letters)))
    names = sorted({name for _, name in linears} | {name.rpartition(".")[2] for _, name in linears})
    return draw.sample(names, draw.randint(1, min(4, len(names))))
