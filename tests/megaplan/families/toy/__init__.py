"""T blocks: two matrices through a bottleneck. A test puts this folder beside the families of a copy of megaplan."""

from megaplan.families.toy.formulas import FORMULAS
from megaplan.families.toy.program import SELECTIVE, toy_program, toy_work
from megaplan.families.toy.rules import toy_rules
from megaplan.families.toy.tensors import toy_tensors

from megaplan.families.family import Family

TOY = Family(
    letter="T",
    title="toy",
    section="toy",
    tensors=toy_tensors,
    program=toy_program,
    work=toy_work,
    formulas=FORMULAS,
    selective=lambda _toy, _variant: SELECTIVE,
    rules=toy_rules,
    timed=False,
)
