"""Runs the optimised TTIR of a kernel with numpy: the compiler's result, whereas the interpreter runs the Python.

A module's text is translated into one Python function. bf16 values are stored in fp32 and rounded where the module rounds. Pointers are
addresses of the tensors' own memory, and an access outside of the storages of the launch's tensors is an error. Sums are those of a tree.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ttir_values as values
from launches import Launch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor
from ttir_memory import Memory, type_name

NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
INFIX = {"addf": "+", "subf": "-", "mulf": "*", "divf": "/", "addi": "+", "subi": "-", "muli": "*"}
INFIX |= {"andi": "&", "ori": "|", "xori": "^", "shli": "<<", "shrsi": ">>"}
BY_TYPE = ("extf", "truncf", "extsi", "trunci", "sitofp", "fptosi", "extui", "uitofp", "bitcast", "fp_to_fp")
"""Conversions, `... : from to to` or `... : from -> to`."""
IGNORED = ("ttg.barrier", "gpu.barrier", "tt.debug_barrier", "tt.assert", "ttg.local_barrier")


class Operation(NamedTuple):
    """A line without its results, their names, and the lines of its regions."""

    text: str
    results: tuple[str, ...]
    regions: list[list["Operation"]]

    @property
    def name(self) -> str:
        return self.text.split(maxsplit=1)[0].split("(")[0].strip('"')


def operations(text: str) -> list[Operation]:
    """The lines of a module as a tree. Labels of blocks are separate operations."""
    root: list[Operation] = []
    open_regions, current = [], root
    for line in (each.strip() for each in text.splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.startswith("}"):
            if line in ("} else {", "} do {"):
                open_regions[-1][0].regions.append([])
                current = open_regions[-1][0].regions[-1]
                continue
            owner, current = open_regions.pop()
            if line.startswith("})"):  # the types of a reduction come after its region
                current[-1] = owner._replace(text=owner.text + line[2:])
            continue
        found = re.match(r"(%[\w$.-]+(?:, %[\w$.-]+)*)(?::(\d+))? = ", line)
        several = range(int(found[2] or 0)) if found else ()
        names = tuple(f"{found[1]}#{index}" for index in several) or tuple(found[1].split(", ")) if found else ()
        text = line[found.end() :] if found else line
        opens = text.endswith("{")
        made = Operation(text.removesuffix("{").removesuffix("({").strip(), names, [[]] if opens else [])
        current.append(made)
        if opens:
            open_regions.append((made, current))
            current = made.regions[0]
    return root


def python_name(name: str) -> str:
    return "v_" + re.sub(r"\W", "_", name[1:].replace("#", "__of_"))


def element_of(kind: str) -> str:
    """`f32` of `tensor<8x16xf32>`, or of itself."""
    found = re.match(r"tensor<(?:\d+x)*(.+)>$", kind.strip())
    return found[1] if found else kind.strip()


def shape_of(kind: str) -> tuple[int, ...]:
    found = re.match(r"tensor<((?:\d+x)+)", kind.strip())
    return tuple(int(side) for side in found[1].removesuffix("x").split("x")) if found else ()


class Translation:
    """Python source of one function, and the constants that it reads."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.numbers = itertools.count()

    def emit(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    def block(self, body: list[Operation], depth: int, ends: Callable[[list[str]], str], blocks: dict[str, list[Operation]]) -> None:
        """The operations of a region; `ends` makes the line that receives its yielded values."""
        for each in body:
            if each.name in ("scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return"):
                self.emit(depth, ends([python_name(name) for name in NAME.findall(each.text.partition(" : ")[0])]))
            elif each.name == "tt.return":
                self.emit(depth, "return")
            elif each.name == "cf.cond_br":
                condition, first, second = re.match(r"cf\.cond_br (%\S+), \^(\w+), \^(\w+)", each.text).groups()
                self.emit(depth, f"if {python_name(condition)}:")
                self.block(blocks[first], depth + 1, ends, blocks)
                self.emit(depth, "else:")
                self.block(blocks[second], depth + 1, ends, blocks)
            elif each.name == "cf.br":
                self.block(blocks[re.match(r"cf\.br \^(\w+)$", each.text)[1]], depth, ends, blocks)
            elif each.name not in IGNORED:
                self.operation(each, depth)

    def operation(self, each: Operation, depth: int) -> None:
        own, method = [python_name(name) for name in each.results], getattr(self, each.name.replace(".", "_"), None)
        if method is not None:
            method(each, own, depth)
        elif each.name == "arith.constant":
            value, _, kind = each.text.removeprefix("arith.constant ").partition(" : ")
            element = element_of(kind or "i1")  # `false` and `true` are printed without a type
            self.emit(depth, f"{own[0]} = {self.keep(values.constant(value, element, shape_of(kind)))}")
        else:
            self.emit(depth, f"{', '.join(own)} = {self.expression(each)}" if own else self.expression(each))

    def keep(self, value: Any) -> str:
        name = f"constant_{next(self.numbers)}"
        self.constants[name] = value
        return name

    def expression(self, each: Operation) -> str:
        """An operation without a region: its operands in order, then the types and attributes that its helper needs."""
        dialect, _, name = each.name.partition(".")
        attributes = "".join(re.findall(r"\{.*?\}", each.text))
        head, _, types = re.sub(r" ?<?\{.*?\}>?", "", each.text).partition(" : ")
        given = [python_name(found) for found in NAME.findall(head)]
        result = re.split(r" -> | to ", types)[-1]
        element = element_of(result)
        if dialect == "arith" and name in INFIX and element != "bf16":
            return f"{given[0]} {INFIX[name]} {given[1]}"
        prefetches = name == "elementwise_inline_asm" and "prefetch" in head
        if prefetches or name in ("load", "store", "descriptor_load"):
            loads = [repr(element), repr(shape_of(result))] if name == "descriptor_load" else []
            accesses = [repr(type_name(element_of(types)))] if name in ("load", "store") else []
            return f"memory.prefetch({given[0]})" if prefetches else f"memory.{name}({', '.join([*loads, *accesses, *given])})"
        if name == "addptr":
            return f"{given[0]} + {given[1]} * {values.size_of(type_name(element_of(types.partition(', ')[0])))}"
        if name in ("get_program_id", "get_num_programs"):
            return f"{'place' if name == 'get_program_id' else 'grid'}[{'xyz'.index(each.text.split()[1])}]"
        if name in ("cmpi", "cmpf"):
            return f"values.{name}({head.split()[1].rstrip(',')!r}, {', '.join(given)})"
        extra = [repr(shape_of(result))] if name in ("splat", "broadcast", "reshape") else []
        extra += (
            [repr([int(number) for number in re.findall(r"(?:start|end|axis) = (\d+)", attributes)])]
            if name in ("make_range", "expand_dims")
            else []
        )
        extra += [repr([int(number) for number in re.findall(r"\d+", attributes.partition("array<i32:")[2])])] if name == "trans" else []
        extra += [repr(re.search(r'"([^"]*)"', head)[1])] if name == "elementwise_inline_asm" else []
        if name in BY_TYPE:
            extra += [repr(element_of(re.split(r" -> | to ", types)[0])), repr(element)]
        made = f"values.{name}({', '.join([*given, *extra])})"
        return (
            f"values.rounded({made})" if dialect in ("arith", "math") and element == "bf16" and name not in (*BY_TYPE, "select") else made
        )

    def scf_for(self, each: Operation, own: list[str], depth: int) -> None:
        head = r"scf\.for (?:unsigned )?(%\S+) = (%\S+) to (%\S+) step (%\S+)"
        index, *bounds = (python_name(name) for name in re.match(head, each.text).groups())
        carried = re.search(r"iter_args\((.*?)\)", each.text)
        pairs = [(python_name(a), python_name(b)) for a, b in re.findall(r"(%\S+) = (%[^\s,)]+)", carried[1])] if carried else []
        names = [name for name, _ in pairs]
        if pairs:
            self.emit(depth, f"{', '.join(names)} = {', '.join(first for _, first in pairs)}")
        self.emit(depth, f"for {index} in values.steps({', '.join(bounds)}):")
        self.emit(depth + 1, "pass")
        self.block(each.regions[0], depth + 1, lambda last: f"{', '.join(names)} = {', '.join(last)}" if names else "pass", {})
        if own:
            self.emit(depth, f"{', '.join(own)} = {', '.join(names)}")

    def scf_while(self, each: Operation, own: list[str], depth: int) -> None:
        pairs = re.findall(r"(%\S+) = (%[^\s,)]+)", each.text)
        carried = [python_name(name) for name, _ in pairs]
        before, (label, *after) = each.regions
        inside = [python_name(name) for name in NAME.findall(label.text)]
        self.emit(depth, f"{', '.join(carried)}, = {', '.join(python_name(first) for _, first in pairs)},")
        self.emit(depth, "while True:")
        self.block(before, depth + 1, lambda last: f"goes_on, {', '.join(own)} = {', '.join(last)}", {})
        self.emit(depth + 1, "if not goes_on:")
        self.emit(depth + 2, "break")
        self.emit(depth + 1, f"{', '.join(inside)}, = {', '.join(own)},")
        self.block(after, depth + 1, lambda last: f"{', '.join(carried)}, = {', '.join(last)},", {})

    def scf_if(self, each: Operation, own: list[str], depth: int) -> None:
        condition = python_name(re.match(r"scf\.if (%\S+)", each.text)[1])
        for word, region in zip((f"if {condition}:", "else:"), each.regions, strict=False):
            self.emit(depth, word)
            self.emit(depth + 1, "pass")
            self.block(region, depth + 1, lambda last: f"{', '.join(own)} = {', '.join(last)}" if own else "pass", {})

    def tt_reduce(self, each: Operation, own: list[str], depth: int, helper: str = "reduce") -> None:
        function = f"combine_{next(self.numbers)}"
        label, *body = each.regions[0]
        self.emit(depth, f"def {function}({', '.join(python_name(name) for name in NAME.findall(label.text))}):")
        self.block(body, depth + 1, lambda last: f"return ({', '.join(last)},)", {})
        operands = ", ".join(python_name(name) for name in NAME.findall(re.match(r'"[\w.]+"\((.*?)\)', each.text)[1]))
        axis, reverse = int(re.search(r"axis = (\d+)", each.text)[1]), "reverse = true" in each.text
        self.emit(depth, f"{', '.join(own)}, = values.{helper}([{operands}], {axis}, {reverse}, {function})")

    def tt_scan(self, each: Operation, own: list[str], depth: int) -> None:
        self.tt_reduce(each, own, depth, "scan")


def blocks_of(body: list[Operation]) -> dict[str, list[Operation]]:
    """The blocks of a function by label; the first block has no label."""
    found: dict[str, list[Operation]] = {"": []}
    label = ""
    for each in body:
        if each.text.startswith("^"):
            label = re.match(r"\^(\w+)", each.text)[1]
            found[label] = []
        else:
            found[label].append(each)
    return found


Kernel = Callable[..., None]
"""A function of (place, grid, memory, *arguments)."""


def translated(text: str) -> Kernel:
    """The kernel of a module."""
    (function,) = (each for each in functions(operations(text)) if "public" in each.text)
    head = re.search(r"@[\w$.-]+\((.*)\)", function.text)
    names = re.findall(r"(%[\w$.-]+): ", head[1])
    made = Translation()
    made.emit(0, f"def kernel({', '.join(['place', 'grid', 'memory', *map(python_name, names)])}):")
    blocks = blocks_of(function.regions[0])
    made.block(blocks[""], 1, lambda _: "return", blocks)
    space = {"values": values, **made.constants}
    exec("\n".join(made.lines), space)
    kernel: Kernel = space["kernel"]
    return kernel


def functions(module: list[Operation]) -> Iterator[Operation]:
    for each in module:
        if each.name == "tt.func":
            yield each
        for region in each.regions if each.name in ("module", "builtin.module") else []:
            yield from functions(region)


def execute(launch: Launch, kernel: Kernel) -> None:
    """All programs of a launch, in order."""
    given = list(arguments_of(launch.source.signature.values(), launch.arguments.values()))
    tensors = [value.base if isinstance(value, TensorDescriptor) else value for _, value in given]
    memory, grid = Memory([each for each in tensors if isinstance(each, Tensor)]), (*launch.grid, 1, 1)[:3]
    arguments = [values.argument(value, kind) for kind, value in given]
    with values.quiet():
        for place in itertools.product(*(range(size) for size in reversed(grid))):
            kernel([values.i32(index) for index in reversed(place)], [values.i32(size) for size in grid], memory, *arguments)


def arguments_of(kinds: Iterable[Any], given: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Arguments that the compiled kernel still takes: no constants, parts of tuples one by one, sides and strides after a descriptor."""
    for kind, value in zip(kinds, given, strict=True):
        if isinstance(kind, tuple):
            yield from arguments_of(kind, value)
        elif isinstance(value, TensorDescriptor):
            yield from [(kind, value), *(("i32", side) for side in value.shape), *(("i64", stride) for stride in value.strides)]
        elif kind != "constexpr":
            yield kind, value
