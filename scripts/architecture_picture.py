"""Draws docs/architecture.svg: from a spec to a plan and a run, and which package holds each step. Standard library only.

python scripts/architecture_picture.py [--check]
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

TARGET = Path(__file__).parents[1] / "docs" / "architecture.svg"
WIDTH, HEIGHT = 1040, 470
BOX_WIDTH, BOX_HEIGHT = 136, 56
FILLS = {"input": "#f3f0e8", "megaplan": "#dce9f7", "file": "#fbe7c6", "megarun": "#d9ead3", "megakernels": "#eadcf2"}
INK, LINE = "#1b2733", "#5a6b7b"


@dataclass(frozen=True)
class Box:
    """A step or a file: its upper left corner, its name, and the package or path below it."""

    x: int
    y: int
    name: str
    below: str
    kind: str


BOXES = {
    "yaml": Box(20, 40, "spec.yaml", "or a plan", "input"),
    "hf": Box(20, 120, "config.json", "Hugging Face", "input"),
    "launch": Box(20, 200, "launch.sh", "Megatron-LM", "input"),
    "spec": Box(196, 80, "Spec", "megaplan.spec", "megaplan"),
    "import": Box(196, 170, "import", "megaplan.importers", "megaplan"),
    "inventory": Box(372, 80, "Inventory", "every tensor", "megaplan"),
    "cost": Box(372, 170, "Costs", "FLOPs, bytes, ns", "megaplan"),
    "cuts": Box(548, 80, "Cuts", "megaplan.partition", "megaplan"),
    "schedules": Box(548, 170, "Schedule", "megaplan.schedules", "megaplan"),
    "layout": Box(724, 80, "Layout", "megaplan.layout", "megaplan"),
    "budget": Box(724, 170, "Budget", "megaplan.budget", "megaplan"),
    "plan": Box(890, 125, "plan.json", "reviewed, digested", "file"),
    "export": Box(890, 260, "export", "megaplan.exporters", "megaplan"),
    "job": Box(724, 310, "Build", "megarun.engine", "megarun"),
    "train": Box(548, 310, "Train", "megarun.training", "megarun"),
    "trace": Box(724, 395, "Trace", "megarun.trace", "megarun"),
    "kernels": Box(548, 395, "Operations", "megakernels", "megakernels"),
    "tokens": Box(372, 310, "Batches", "megarun.data", "megarun"),
    "corpus": Box(196, 310, "tokenize", "token file", "file"),
    "checkpoint": Box(372, 395, "Checkpoints", "megarun.checkpoint", "megarun"),
}
ARROWS = (
    *(("yaml", "spec"), ("hf", "import"), ("launch", "import"), ("import", "spec"), ("spec", "inventory"), ("inventory", "cuts")),
    *(("inventory", "cost"), ("cost", "cuts"), ("cuts", "layout"), ("layout", "budget"), ("schedules", "budget"), ("schedules", "cuts")),
    *(("budget", "plan"), ("layout", "plan"), ("plan", "export"), ("plan", "job"), ("job", "train"), ("job", "trace")),
    *(("kernels", "job"), ("tokens", "train"), ("corpus", "tokens"), ("train", "checkpoint")),
)


def picture() -> str:
    """The SVG: boxes over arrows, no script, no embedded font."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" role="img">',
        "<title>From a spec to a plan, and from a plan to a run</title>",
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *(_arrow(BOXES[start], BOXES[end]) for start, end in ARROWS),
        *map(_box, BOXES.values()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _arrow(start: Box, end: Box) -> str:
    """A line between the sides that face each other."""
    (x1, y1), (x2, y2) = _side(start, end), _side(end, start)
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.5" marker-end="url(#end)"/>'


def _side(box: Box, other: Box) -> tuple[int, int]:
    middle = box.x + BOX_WIDTH // 2, box.y + BOX_HEIGHT // 2
    if other.x >= box.x + BOX_WIDTH:
        return box.x + BOX_WIDTH, middle[1]
    if other.x + BOX_WIDTH <= box.x:
        return box.x, middle[1]
    return (middle[0], box.y + BOX_HEIGHT) if other.y > box.y else (middle[0], box.y)


def _box(box: Box) -> str:
    middle = box.x + BOX_WIDTH // 2
    return (
        f'<rect x="{box.x}" y="{box.y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{FILLS[box.kind]}" stroke="{LINE}"/>'
        f'<text x="{middle}" y="{box.y + 25}" text-anchor="middle" font-size="15" fill="{INK}">{escape(box.name)}</text>'
        f'<text x="{middle}" y="{box.y + 43}" text-anchor="middle" font-size="11" fill="{LINE}">{escape(box.below)}</text>'
    )


def main() -> int:
    """Write the picture, or with --check compare it; 1 if it is another one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if parser.parse_args().check:
        return int(TARGET.read_text(encoding="utf-8") != picture())
    TARGET.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
