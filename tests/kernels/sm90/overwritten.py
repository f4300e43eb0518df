"""Finds a register of a compiled kernel that is written while a product of the warp group may still read it.

A product of the warp group (HGMMA) is asynchronous. Its left operand may be in registers, which must hold until a wait (DEPBAR) leaves
fewer groups of products in flight than were started since. Every path is followed, in each state of what is in flight.
"""

import re
from typing import NamedTuple

NO_RESULT = re.compile(r"(ST|RED|BRA|BRX|JMP|CALL|RET|EXIT|BAR|WARPSYNC|NANOSLEEP|BSYNC|BSSY|CCTL|MEMBAR|[A-Z]*SETP|LDGSTS|UTMA|R2B|KILL)")
"""Instructions whose first general register, if they have one, is read."""
WIDE = {"64": 2, "128": 4}
OPERAND_REGISTERS = 4
"""Registers of a left operand: 64 rows of 32 bytes over the 128 threads of a warp group."""

Groups = tuple[frozenset[tuple[int, int]], ...]


class Instruction(NamedTuple):
    address: int
    text: str

    @property
    def name(self) -> str:
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]


def instructions(disassembly: str) -> list[Instruction]:
    return [Instruction(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;/]+);", disassembly)]


def written(instruction: Instruction) -> range:
    """Numbers of the general registers that an instruction writes when it is issued; a product's sums are not among them."""
    name = instruction.name
    if name.startswith("HGMMA") or NO_RESULT.match(name):
        return range(0)
    operands = re.sub(r"^@!?U?P\w+\s+", "", instruction.text)[len(name) :]
    found = re.match(r"\s*(?:!?U?P\w+,\s*)*R(\d+)\b", operands)
    if found is None:
        return range(0)
    first, count = int(found[1]), 1
    parts = name.split(".")
    if parts[0] == "LDSM":
        count = int(parts[-1]) if parts[-1].isdigit() else 1
    elif parts[0].startswith(("LD", "ATOM")):
        count = next((WIDE[part] for part in parts if part in WIDE), 1)
    elif "WIDE" in parts or parts[0] in ("DADD", "DMUL", "DFMA") or (parts[0] == "CS2R" and "32" not in parts):
        count = 2
    elif parts[0] in ("HMMA", "IMMA", "QMMA"):
        count = 4
    return range(first, first + count)


def after(instruction: Instruction, groups: Groups, started: frozenset[tuple[int, int]]) -> tuple[Groups, frozenset[tuple[int, int]]]:
    """The groups in flight, oldest first, and the products that no group has yet: register and the address of its product, each."""
    if instruction.name.startswith("HGMMA"):
        left = re.match(r"\S+\s+R\d+,\s*R(\d+)\b", re.sub(r"^@!?U?P\w+\s+", "", instruction.text))
        if left:
            started |= {(int(left[1]) + each, instruction.address) for each in range(OPERAND_REGISTERS)}
        if "gsb0" in instruction.text:
            return (*groups, started), frozenset()
    elif waits := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", instruction.text):
        keeps = int(waits[1], 16)
        return groups[len(groups) - min(keeps, len(groups)) :], started
    return groups, started


def overwritten(disassembly: str) -> list[str]:
    """The instructions that write what a product in flight reads, each with that product."""
    code = instructions(disassembly)
    places = {each.address: index for index, each in enumerate(code)}
    found: dict[tuple[int, int], str] = {}
    seen: set[tuple[int, Groups, frozenset[tuple[int, int]]]] = set()
    ahead: list[tuple[int, Groups, frozenset[tuple[int, int]]]] = [(0, (), frozenset())]
    while ahead:
        index, groups, started = ahead.pop()
        while index < len(code) and (index, groups, started) not in seen:
            if groups or started or code[index].name.startswith("BRA"):
                seen.add((index, groups, started))
            each = code[index]
            writes = written(each)
            for register, product in started.union(*groups):
                if register in writes:
                    found[product, each.address] = (
                        f"{each.address:#x} {each.text} writes what {code[places[product]].text} at {product:#x} reads"
                    )
            groups, started = after(each, groups, started)
            jump = re.search(r"\bBRA\S*\s+(?:\S+,\s*)*0x([0-9a-f]+)", each.text)
            if jump and int(jump[1], 16) in places:
                ahead.append((places[int(jump[1], 16)], groups, started))
                if not each.text.startswith("@") and "DIV" not in each.name:
                    break
            if each.text.startswith("EXIT"):
                break
            index += 1
    return list(found.values())
