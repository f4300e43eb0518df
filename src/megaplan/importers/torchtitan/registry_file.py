"""Configurations in Python, which torchtitan has since 2026 (`config_registry.py`), read from the syntax tree: nothing in the file runs.

A configuration is a function that returns `Trainer.Config(...)`. Constants, arithmetic with integers, calls of other functions of the
file, assignments to names and to fields of a configuration are followed. Everything else is an unknown value, which is an error in a key
that matters.

Source: torchtitan/models/llama3/config_registry.py and qwen3/config_registry.py of pytorch/torchtitan, 2026.
"""

import ast
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.scalars import MAX_INT

CONFIG = "Config"
CHUNKED_LOSS = "loss.chunked"
"""Key of a loss that never has all logits."""
STATED = "model.stated"
"""Key of a model with its sizes."""
MOST_CALLS = 64
"""Calls inside calls that are followed."""
ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv
}  # fmt: skip
COPIES = frozenset({"replace", "dataclasses.replace", "copy.copy", "copy.deepcopy", "deepcopy"})
"""Functions whose result is their argument with the fields that are given."""
OPTIMIZERS = {
    "OptimizersContainer.Config": {},
    "default_adamw": {},
    "OptimizersInBackwardContainer.Config": {"early_step_in_backward": True},
}
"""Fields that the calls of an optimizer and of checkpointing state by their names."""
CHECKPOINTS = {
    "FullAC.Config": {"mode": "full"},
    "SelectiveAC.Config": {"mode": "selective"},
    "ActivationCheckpointConfig": {},
    "ActivationCheckpointing.Config": {},
}
CONVERTERS = {"Float8LinearConverter.Config": "quantize.linear.float8"}
"""Converters by the calls that make them, with the section of their keys."""


class Unread(NamedTuple):
    """A value that only running the file would give; `line` is where it is made."""

    line: int


@dataclass(slots=True)
class Made:
    """A call of something outside the file.

    Attributes:
        name: Dotted name of what is called.
        line: Line of the call.
        positional: Values without names.
        given: Values by name; assignments to fields change it.
    """

    name: str
    line: int
    positional: list[Any] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)


class Reader:
    """Follows the functions of one file."""

    def __init__(self, tree: ast.Module, *, builds_layers: bool = False) -> None:
        """`builds_layers`: calls of functions that loop are values, with their arguments."""
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.functions = {node.name: node for node in functions if not (builds_layers and _loops(node))}
        self._depth = 0
        self._module: dict[str, Any] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                self._run(node, self._module)

    def call(self, name: str, positional: list[Any], given: dict[str, Any]) -> Any:
        """Result of a function of the file."""
        function = self.functions[name]
        if self._depth >= MOST_CALLS:
            return Unread(function.lineno)
        scope = dict(zip([each.arg for each in function.args.args], positional, strict=False)) | given
        defaults = function.args.defaults
        for each, value in zip(function.args.args[len(function.args.args) - len(defaults) :], defaults, strict=True):
            scope.setdefault(each.arg, self.value(value, self._module))
        for named, optional in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            if optional is not None:
                scope.setdefault(named.arg, self.value(optional, self._module))
        self._depth += 1
        try:
            for node in function.body:
                if isinstance(node, ast.Return):
                    return None if node.value is None else self.value(node.value, scope)
                self._run(node, scope)
        finally:
            self._depth -= 1
        return None

    def _run(self, node: ast.stmt, scope: dict[str, Any]) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node.targets[0], self.value(node.value, scope), scope)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self.value(node.value, scope), scope)
        elif not isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.FunctionDef | ast.Pass) and not _is_text(node):
            self._forget(node, scope)

    def _forget(self, node: ast.stmt, scope: dict[str, Any]) -> None:
        """Forget values that a branch, a loop or a call may change: fields that it assigns, and all names in a loop or call."""
        if isinstance(node, ast.For) and self._changes_fields(node, scope):
            return
        named: list[ast.AST] = []
        for each in ast.walk(node):
            if isinstance(each, ast.Assign):
                for target in each.targets:
                    self._assign(target, Unread(each.lineno), scope)
            elif isinstance(each, ast.AugAssign | ast.AnnAssign):
                self._assign(each.target, Unread(each.lineno), scope)
            elif isinstance(each, ast.For | ast.AsyncFor):
                named += [each.iter, each.target]
            elif isinstance(each, ast.Expr) and not _is_text(each):
                named.append(each)
        for each in [name for part in named for name in ast.walk(part) if isinstance(name, ast.Name)]:
            if each.id in scope or isinstance(each.ctx, ast.Store):
                scope[each.id] = Unread(node.lineno)

    def _changes_fields(self, loop: ast.For, scope: Mapping[str, Any]) -> bool:
        """True if a loop only assigns fields of the items that it iterates over, which are unknown afterwards."""
        changed, made = _fields_alone(loop), self.value(loop.iter, scope)
        owners = [each for each in (made if isinstance(made, list) else [made]) if isinstance(each, Made)]
        for owner in owners if changed is not None else ():
            owner.given |= {name: Unread(loop.lineno) for name in changed or ()}
        return bool(owners) and changed is not None

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Tuple):
            values = value if isinstance(value, list) and len(value) == len(target.elts) else [Unread(target.lineno)] * len(target.elts)
            for each, own in zip(target.elts, values, strict=True):
                self._assign(each, own, scope)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, scope)
            if isinstance(owner, Made):
                owner.given[target.attr] = value
            else:  # a field of an unknown object: everything that contains it is unknown, too
                root = target.value
                while isinstance(root, ast.Attribute):
                    holder = self.value(root.value, scope)
                    if isinstance(holder, Made):
                        is_default = root is target.value and _is_config(holder) and root.attr not in holder.given
                        holder.given[root.attr] = Made("", target.lineno, [], {target.attr: value}) if is_default else Unread(target.lineno)
                        return
                    root = root.value
                if isinstance(root, ast.Name):
                    scope[root.id] = Unread(target.lineno)

    def value(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        """The value of an expression."""
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [self.value(each, scope) for each in node.elts]
            case ast.Name():
                return scope.get(node.id, self._module.get(node.id, Unread(node.lineno)))
            case ast.Attribute():
                return _field(self.value(node.value, scope), node)
            case ast.Call():
                return self._called(node, scope)
        return self._number(node, scope)

    def _number(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        """The value of arithmetic."""
        found: Any = Unread(node.lineno)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self.value(node.operand, scope)
            found = -number if _is_number(number) else found
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            left, right = self.value(node.left, scope), self.value(node.right, scope)
            safe = _is_number(left) and _is_number(right) and max(abs(left), abs(right)) <= MAX_INT
            if safe and (right or not isinstance(node.op, ast.FloorDiv | ast.Div)):
                found = ARITHMETIC[type(node.op)](left, right)
        return found

    def _called(self, node: ast.Call, scope: Mapping[str, Any]) -> Any:
        name = _dotted(node.func)
        if name is None or any(each.arg is None for each in node.keywords) or any(isinstance(each, ast.Starred) for each in node.args):
            return Unread(node.lineno)
        positional = [self.value(each, scope) for each in node.args]
        given = {each.arg: self.value(each.value, scope) for each in node.keywords if each.arg is not None}
        if name in self.functions:
            return self.call(name, positional, given)
        if name in COPIES and positional and isinstance(positional[0], Made):
            first = positional[0]
            return Made(first.name, first.line, first.positional, first.given | given)
        return Made(name, node.lineno, positional, given)


def read_registry(text: str, name: str, function: str | None = None) -> dict[str, Any]:
    """Dotted keys of a configuration of a file.

    Args:
        text: Text of the file.
        name: Name of the file in diagnostics; the folder of torchtitan's own files names the model.
        function: The configuration's function; None if the file has one.

    Raises:
        MegaplanError: MP916, the text is not Python; MP933, the function is not in the file, or none is given and there are several;
            MP932, a value that matters is known only by running the file.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MegaplanError([diagnostic("MP916", f"no Python: {error}", Location(name))]) from None
    reader = Reader(tree)
    made, chosen = _chosen({each: reader.call(each, [], {}) for each in reader.functions}, name, function)
    from megaplan.importers.torchtitan.models import REFUSED  # noqa: PLC0415  (its own table)

    _refuse_loop(made, name, chosen)
    keys = dict(_keys(made, name, chosen))
    unread = {key: value for key, value in keys.items() if isinstance(value, Unread if key == STATED else Unread | Made)}
    if unread and keys.get("model.name") not in REFUSED and keys.get("fault_tolerance.enable") is not True:  # which have a better reason
        where = [(key, Location(name, line=value.line), value.line) for key, value in unread.items()]
        raise MegaplanError([diagnostic("MP932", f"{key} is made on line {line}", at) for key, at, line in where])
    return {key: value for key, value in keys.items() if key not in unread}


def _refuse_loop(made: Made, name: str, function: str) -> None:
    """Refuses a configuration of post-training, which has generators of answers next to a trainer.

    Raises:
        MegaplanError: MP926.
    """
    if of_loop := sorted(_OF_LOOPS & made.given.keys()):
        detail = (
            f"{function} returns {made.name} with {', '.join(of_loop)}: training on generated answers; a job of torchtitan has one model"
        )
        hint = "megaplan explain post_training   # the section that plans it, over the spec of the model that is trained"
        raise MegaplanError([diagnostic("MP926", detail, Location(name, line=made.line), (hint,))])


_OF_LOOPS = {"async_loop", "generator", "num_generators", "rollouter", "trainer"}
"""Fields of configurations of `torchtitan/experiments/rl`."""


def _chosen(found: Mapping[str, Any], name: str, function: str | None) -> tuple[Made, str]:
    """The configuration that is asked for, or the only one of the file; and its function.

    Raises:
        MegaplanError: MP932 or MP933.
    """
    known = [each for each, made in found.items() if _is_config(made)]
    chosen = function or (known[0] if len(known) == 1 else None)
    if chosen is not None and chosen not in known and isinstance(made := found.get(chosen), Unread | Made):
        where = f"on line {made.line}" if isinstance(made, Unread) else f"by {made.name}, which is not in the file"
        raise MegaplanError([diagnostic("MP932", f"the value that {chosen} returns is built {where}", Location(name, line=made.line))])
    if chosen is None or chosen not in known:
        asked = f"no function {function} of the file returns" if function else f"{len(known) or 'no'} functions of the file return"
        hints = [f"--config {each}" for each in known[:12]]
        raise MegaplanError([diagnostic("MP933", f"{asked} a Trainer.Config", Location(name), hints)])
    return found[chosen], chosen


IGNORED = frozenset(
    {"hf_assets_path", "metrics", "profiling", "profiler", "dataloader", "validator", "checkpoint", "lr_scheduler", "debug", "comm", "job"}
    | {"tokenizer", "loss", "dump_folder", "print_config"}
)
"""Fields of a configuration that change no tensor of a step; of the loss, only the chunking of logits."""


def _keys(config: Made, name: str, function: str) -> Iterator[tuple[str, Any]]:
    yield "activation_checkpoint.mode", "selective"
    yield "activation_checkpoint.selective_ac_option", "op"
    for key, value in config.given.items():
        if key == "loss" and isinstance(value, Made) and "Chunked" in value.name:
            yield CHUNKED_LOSS, True
        if key in IGNORED:
            continue
        if key == "model_spec":
            yield from _model(value, name, function)
        elif key == "model_converters" and isinstance(value, Made):
            yield from _converters(value.given.get("converters", []))
        elif key in ("optimizer", "activation_checkpoint") and isinstance(value, Made):
            known = OPTIMIZERS if key == "optimizer" else CHECKPOINTS
            own = known.get(value.name)
            yield from ([(key, value)] if own is None else [(f"{key}.{each}", at) for each, at in (own | value.given).items()])
        elif key == "activation_checkpoint" and value is None:
            yield "activation_checkpoint.mode", "none"
        elif isinstance(value, Made) and not value.positional:
            yield from ((f"{key}.{each}", at) for each, at in value.given.items())
        else:
            yield key, value


def _model(made: Any, name: str, function: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(made, Made):
        yield "model.flavor", made
        return
    if "model" in made.given:
        yield from _stated(made)
        return
    yield "model.name", _model_name(name, function)
    yield "model.flavor", made.positional[0] if made.positional else made.given.get("flavor", Unread(made.line))
    for key, value in made.given.items():
        if key == "converters":
            yield from _converters(value)
        elif key != "flavor":
            yield f"model.{key}", value


def _stated(made: Made) -> Iterator[tuple[str, Any]]:
    """A model whose sizes the file itself states."""
    model = made.given["model"]
    yield "model.name", made.given.get("name")
    yield "model.flavor", made.given.get("flavor")
    yield STATED, model if isinstance(model, Made | Unread) else Unread(made.line)


def _converters(made: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(made, list) or not all(isinstance(each, Made) for each in made):
        yield "model.converters", made
        return
    yield "model.converters", [CONVERTERS.get(each.name, _converter(each)) for each in made]
    for each in made:
        if each.name in CONVERTERS:
            section = CONVERTERS[each.name]
            yield from ((f"{section}.{key}", value) for key, value in each.given.items() if key != "model_compile_enabled")


def _converter(made: Made) -> str:
    """The name that a call states, or its own."""
    first = made.positional[0] if made.positional else None
    return first if isinstance(first, str) else made.name.removesuffix(f".{CONFIG}")


def _model_name(name: str, function: str) -> str:
    """The model's name: the folder of torchtitan's own file, or the beginning of the function's name."""
    from megaplan.importers.torchtitan.models import FLAVORS, REFUSED  # noqa: PLC0415  (its own table)

    known = {*FLAVORS, *(each for each in REFUSED if "/" not in each)}
    parts = name.replace("\\", "/").split("/")
    folder = parts[-2] if len(parts) > 1 else ""
    if folder in known or (folder and function.startswith(f"{folder}_")):
        return folder  # qwen3_vl is not qwen3
    found = [each for each in known if f"{function}_".startswith(f"{each}_")]
    return max(found, key=len) if found else folder or function


def _field(owner: Any, node: ast.Attribute) -> Any:
    return owner.given.get(node.attr, Unread(node.lineno)) if isinstance(owner, Made) else Unread(node.lineno)


def _is_config(made: Any) -> bool:
    return isinstance(made, Made) and "model_spec" in made.given  # a fork's class has another name


def _fields_alone(loop: ast.For) -> list[str] | None:
    """The fields of the loop's own variable that it assigns; None if it does anything else."""
    found = []
    for node in loop.body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        owner: ast.expr | None = target
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if not isinstance(target, ast.Attribute) or not (isinstance(owner, ast.Name) and ast.unparse(loop.target) == owner.id):
            return None
        found.append(target.attr)
    return found


def _loops(function: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.For | ast.ListComp) for each in ast.walk(function))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    owner = _dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{owner}.{node.attr}" if owner is not None and isinstance(node, ast.Attribute) else None
