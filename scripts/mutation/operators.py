"""One-operator changes of a module's source: the position of each, and the replacement text.

Left out is what no test should hold: docstrings and other texts, annotations, decorators, `__all__`, what only a type checker runs, and the
arguments of diagnostics and exceptions.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "accumulate": "list", "ceil": "floor", "floor": "ceil"}
SAYING = {
    "diagnostic",
    "refuse",
    "Diagnostic",
    "Location",
    "ValueError",
    "TypeError",
    "KeyError",
    "AssertionError",
    "MegaplanError",
    "format_bytes",
}
"""Calls whose arguments are texts for a reader, or the place they are about."""


class Mutant(NamedTuple):
    """A change of one node.

    Attributes:
        path: Path of the module, from the root of the tree.
        line: Line of the node, from 1.
        statement: First line of its statement.
        start: Start of the replaced text, in bytes.
        stop: End of the replaced text, in bytes.
        text: Replacement.
        what: Description of the change.
        on_import: True if it runs when the module is imported, not when a function is called.
    """

    path: str
    line: int
    statement: int
    start: int
    stop: int
    text: str
    what: str
    on_import: bool

    def applied(self, source: bytes) -> bytes:
        """The module with the change."""
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def line_texts(self, source: bytes) -> tuple[str, str]:
        """The line of the change before and after it."""
        start = source.rfind(b"\n", 0, self.start) + 1
        before, after = source[start:], self.applied(source)[start:]
        num_lines = source[start : self.stop].count(b"\n") + 1
        old = b" ".join(line.strip() for line in before.split(b"\n")[:num_lines])
        new = b" ".join(
            line.strip() for line in after.split(b"\n")[: 1 + after[: self.start - start + len(self.text.encode())].count(b"\n")]
        )
        return old.decode(), new.decode()


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a module, in source order."""
    return sorted(_Finder(path, source).found, key=lambda mutant: (mutant.start, mutant.stop, mutant.text))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.found = path, source, list[Mutant]()
        self._offsets = [0]
        for line in source.split(b"\n"):
            self._offsets.append(self._offsets[-1] + len(line) + 1)
        self._statement, self._returns = 1, [""]
        self.visit(ast.parse(source))

    def _add(self, node: ast.expr | ast.stmt, text: str, what: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._offsets[node.lineno - 1] + node.col_offset
        stop = self._offsets[node.end_lineno - 1] + node.end_col_offset
        self.found.append(Mutant(self.path, node.lineno, self._statement, start, stop, text, what, len(self._returns) == 1))

    def _swap(self, node: ast.expr, changed: ast.expr, what: str) -> None:
        self._add(node, f"({ast.unparse(changed)})", what)

    def visit(self, node: ast.AST) -> None:
        """Keep the statement, and leave out what is not a code of the program."""
        outer = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node.lineno
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id in ("__all__", "__slots__") for to in node.targets):
            return
        super().visit(node)
        self._statement = outer

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip texts."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip expressions whose only purpose is the text of an error."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions, which are for readers."""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visit only the body of a class."""
        for each in node.body:
            self.visit(each)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit defaults and body of a function, without decorators and annotations."""
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._returns.append("" if node.returns is None else ast.unparse(node.returns))
        for each in node.body:
            self.visit(each)
        self._returns.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value alone."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """The value alone; a union of types at the top of a module is none."""
        if (
            isinstance(node.value, ast.BinOp)
            and isinstance(node.value.op, ast.BitOr)
            and self._statement == node.lineno
            and not node.col_offset
        ):
            return
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_Call(self, node: ast.Call) -> None:
        """Names of functions that have a counterpart; the arguments unless they are texts."""
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if isinstance(node.func, ast.Name) and name in FUNCTIONS:
            self._add(node.func, FUNCTIONS[name], f"{name} → {FUNCTIONS[name]}")
        if name in SAYING or name.endswith("Error"):
            return
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg != "strict":  # the argument `strict` of zip is a check, not behaviour
                self.visit(keyword.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another arithmetic operator."""
        self.generic_visit(node)
        if any(
            isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        ):
            return
        if type(node.op) in ARITHMETIC:
            other = ARITHMETIC[type(node.op)]
            self._swap(node, ast.BinOp(node.left, other(), node.right), f"{type(node.op).__name__} → {other.__name__}")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Another arithmetic operator, in place."""
        self.visit(node.value)
        if type(node.op) in ARITHMETIC and not isinstance(node.value, ast.List | ast.ListComp | ast.JoinedStr):
            other = ARITHMETIC[type(node.op)]
            self._add(node, ast.unparse(ast.AugAssign(node.target, other(), node.value)), f"{type(node.op).__name__}= → {other.__name__}=")

    def visit_Compare(self, node: ast.Compare) -> None:
        """Each comparison of a chain."""
        self.generic_visit(node)
        for index, op in enumerate(node.ops):
            other = COMPARISONS[type(op)]
            ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
            self._swap(node, ast.Compare(node.left, ops, node.comparators), f"{type(op).__name__} → {other.__name__}")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` and `or`."""
        self.generic_visit(node)
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        self._swap(node, ast.BoolOp(other(), node.values), f"{type(node.op).__name__} → {other.__name__}")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """`not` and minus taken away."""
        self.generic_visit(node)
        if isinstance(node.op, ast.Not | ast.USub):
            self._swap(node, node.operand, f"{type(node.op).__name__} taken away")

    def visit_Constant(self, node: ast.Constant) -> None:
        """Numbers and truth."""
        if isinstance(node.value, bool):
            self._add(node, str(not node.value), "constant")
        elif isinstance(node.value, int):
            self._add(node, str(node.value + 1), "constant")
        elif isinstance(node.value, float):
            self._add(node, repr(node.value * 2 or 1.0), "constant")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """The condition the other way round."""
        self.generic_visit(node)
        self._negate(node.test)

    def visit_If(self, node: ast.If) -> None:
        """The condition the other way round."""
        self.generic_visit(node)
        self._negate(node.test)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """A filter taken away."""
        self.generic_visit(node)
        for test in node.ifs:
            self._add(test, "True", "filter taken away")

    def visit_Slice(self, node: ast.Slice) -> None:
        """A bound moved by one."""
        self.generic_visit(node)
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self._swap(bound, ast.BinOp(bound, ast.Add(), ast.Constant(1)), "bound of a slice")

    def visit_Return(self, node: ast.Return) -> None:
        """A number one larger, a truth the other way round."""
        self.generic_visit(node)
        if node.value is None:
            return
        if self._returns[-1] == "int":
            self._swap(node.value, ast.BinOp(node.value, ast.Add(), ast.Constant(1)), "returned value")
        elif self._returns[-1] == "bool":
            self._swap(node.value, ast.UnaryOp(ast.Not(), node.value), "returned value")

    def visit_Break(self, node: ast.Break) -> None:
        """Replace `break` by `continue`."""
        self._add(node, "continue", "break → continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        """Replace `continue` by `break`."""
        self._add(node, "break", "continue → break")

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.UnaryOp | ast.Compare):
            self._swap(test, ast.UnaryOp(ast.Not(), test), "condition the other way round")


def all_mutants(files: Iterator[tuple[str, bytes]]) -> list[Mutant]:
    """Mutants of all modules, in their order; every one is a program that parses."""
    return [mutant for path, source in files for mutant in mutants_of(path, source)]
