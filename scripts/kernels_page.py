"""Write docs/reference/kernels.md: every operation of megakernels, from its docstring and from what it registers.

python scripts/kernels_page.py [--check]     --check exits 1 if the page is out of date
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import megakernels
from megakernels._common.registration import SAVED
from megakernels._common.scratch import STATED

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/kernels.md"
SECTIONS = ("Args", "Returns", "Saves", "Scratch", "Triton", "Raises", "Source")
GRADIENTS = ("_backward", "_gradients")
"""Ends of the names of public functions that give gradients."""
HEAD = """# Operations of megakernels

Written by `scripts/kernels_page.py` from the operations' docstrings and registrations; `make docs` writes it again. The contract that all
of them keep, and the letters, are in [ops](ops.md).

`from megakernels import NAME` gives the function; as a torch op it is `torch.ops.megakernels.NAME`, with `NAME_gated` for experts with a
gate and `NAME_sigmoid` for sigmoid scores, and its backward `NAME_backward`.
*Saved* are all tensors kept for backward; what has none is called with what its caller kept, or
has no gradient. *Scratch* says whether the operation states bytes that it holds inside itself (`megakernels.scratch_bytes`). *Triton* says
whether CUDA tensors of fp32, bf16 or fp16 run a kernel with `host.kernels: triton`. Every operation has a reference in plain torch.
"""


def operations() -> list[tuple[str, Callable[..., Any]]]:
    """Public functions that are operations, by folder and then by their order in it."""
    found = []
    for name in megakernels.__all__:
        function = getattr(megakernels, name)
        if function.__module__.startswith("megakernels.ops."):
            code = inspect.unwrap(function).__code__
            found.append((function.__module__, code.co_firstlineno, name, function))
    return [(name, function) for _, _, name, function in sorted(found, key=lambda each: each[:2])]


def folder_of(function: Callable[..., Any]) -> str:
    """The folder of an operation, under `megakernels/ops`."""
    return function.__module__.split(".")[2]


def torch_ops(name: str) -> list[str]:
    """The torch ops of a public function, without their backwards."""
    return [f"megakernels.{each}.default" for each in (name, f"{name}_gated", f"{name}_sigmoid") if hasattr(torch.ops.megakernels, each)]


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """A docstring's sections by title; what comes before the first is under the empty title."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):[ \n]", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return {"": parts[0].strip()} | {title: inspect.cleandoc(f"\n{text}") for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def entries(text: str) -> dict[str, str]:
    """A section's `name: description` entries, each on one line."""
    parts = re.split(r"^(\w+): ", text, flags=re.MULTILINE)
    return {name: " ".join(found.split()) for name, found in zip(parts[1::2], parts[2::2], strict=True)}


def saved(name: str) -> tuple[str, ...]:
    """Tensors that an operation keeps for backward, with a gate if it takes one, of each kind of scores."""
    found = sorted((SAVED[op] for op in torch_ops(name) if op in SAVED), key=len, reverse=True)
    return tuple(dict.fromkeys(each for kept in found for each in kept))


def states_scratch(name: str) -> str:
    """Directions of an operation that state the bytes of their scratch."""
    if name.endswith(GRADIENTS):
        return "backward" if any(op in STATED for op in torch_ops(name)) else ""
    forward = any(op in STATED for op in torch_ops(name))
    backward = any(op.replace(".default", "_backward.default") in STATED for op in torch_ops(name))
    return ", ".join(word for word, found in (("forward", forward), ("backward", backward)) if found)


def triton_of(name: str) -> str:
    """`yes` if the docstring of the operation, or of the forward that it belongs to, describes kernels."""
    forward = getattr(megakernels, name.removesuffix("_backward"), getattr(megakernels, name))
    return "yes" if "Triton" in sections(forward) else ""


def described(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """The lines of one operation."""
    found = sections(function)
    yield f"### {name}\n\n```python\n{name}{inspect.signature(function)}\n```\n".replace("torch.Tensor", "Tensor")
    yield found[""] + "\n"
    for argument, text in entries(found.get("Args", "")).items():
        yield f"- `{argument}`: {text}"
    kept, made = saved(name), entries(found.get("Saves", ""))
    listed = {
        "Returns": " ".join(found.get("Returns", "").split()),
        "Saved for backward": "; ".join(f"`{each}`" + (f", {made[each].rstrip('.')}" if each in made else "") for each in kept),
        "Scratch": " ".join(found.get("Scratch", "").split()),
        "Triton": " ".join(found.get("Triton", "").split()),
        "Raises": " ".join(found.get("Raises", "").split()),
        "Source": " ".join(found.get("Source", "").split()),
        "Torch op": ", ".join(f"`torch.ops.{op.removesuffix('.default')}`" for op in torch_ops(name)),
        "Reference": f"`kernels/megakernels/ops/{folder_of(function)}/reference.py`" if torch_ops(name) else "",
    }
    yield ""
    yield from (f"- **{title}**: {text}" for title, text in listed.items() if text)
    yield ""


def page() -> str:
    """The whole page."""
    lines = [HEAD, "| Operation | Saved for backward | Scratch | Triton |", "|---|---|---|---|"]
    for name, _ in operations():
        kept = ", ".join(saved(name))
        lines.append(f"| [`{name}`](#{name}) | {kept} | {states_scratch(name)} | {triton_of(name)} |")
    folder = ""
    for name, function in operations():
        if folder_of(function) != folder:
            folder = folder_of(function)
            lines += ["", f"## ops/{folder}", ""]
        lines += described(name, function)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> int:
    """Write the page, or compare it."""
    made = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == made else 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
