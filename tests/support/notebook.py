"""Notebooks without Jupyter: the code cells of a document run in order, and give the outputs that Jupyter would store."""

import ast
import contextlib
import io
from typing import Any

KINDS = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}
"""Kinds of an output and the method that gives each."""


def outputs_of(document: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of every code cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    return [_outputs("".join(cell["source"]), number, names) for number, cell in enumerate(cells, 1)]


def _outputs(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(tree, f"cell {number}", "exec"), names)
        value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names) if last is not None else None
    found: list[dict[str, Any]] = []
    if said.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": said.getvalue().splitlines(keepends=True)})
    if value is not None:
        data = {kind: getattr(value, method)() for kind, method in KINDS.items() if hasattr(value, method)} | {"text/plain": repr(value)}
        lines = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
        found.append({"data": lines, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return found
