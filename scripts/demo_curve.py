"""Draws the demo's picture: the loss of a run without interruption, and of one that was killed and resumed under another plan.

python scripts/demo_curve.py runs/demo curve.svg
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

BEFORE, AFTER = "pp 2 × dp 2", "tp 2 × pp 2"
WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 54, 52
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
MOST_TICKS = 8

# every colour has a variant for dark themes, and the picture draws its own background, so it is legible on any page
STYLE = """
  .ground { fill: #ffffff; stroke: #d0d7de }
  .grid { stroke: #e4e8ec }
  .axis { stroke: #59636e }
  path { fill: none }
  text { fill: #1f2328; font: 13px system-ui, sans-serif }
  .title { font-weight: 600; font-size: 14px }
  .quiet { fill: #59636e }
  .whole { stroke: #9aa4ae; stroke-width: 6; opacity: .6 }
  .before, .lost { stroke: #0969da; stroke-width: 2 }
  .lost { stroke-dasharray: 2 3 }
  .after { stroke: #bc4c00; stroke-width: 2 }
  .kill { stroke: #cf222e; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; stroke: #3d444d }
    .grid { stroke: #262c36 }
    .axis { stroke: #9198a1 }
    text { fill: #e6edf3 }
    .quiet { fill: #9198a1 }
    .whole { stroke: #656d76 }
    .before, .lost { stroke: #58a6ff }
    .after { stroke: #f0883e }
    .kill { stroke: #ff7b72 }
  }"""


@dataclass(frozen=True, slots=True)
class Broken:
    """The losses of a run that was killed once.

    Attributes:
        before: Losses of the first start, by step.
        after: Losses of the second start, by step.
    """

    before: dict[int, float]
    after: dict[int, float]

    @property
    def killed_after(self) -> int:
        """The last step of the first start."""
        return max(self.before)

    @property
    def resumed_after(self) -> int:
        """The step of the checkpoint from which the second start resumed."""
        return min(self.after) - 1

    @property
    def losses(self) -> dict[int, float]:
        """The one curve: of a step that was made twice, the last."""
        return self.before | self.after


def step_losses(run: Path) -> list[tuple[int, float]]:
    """Step and loss of every step in metrics.jsonl, as they were made; a line that a kill has cut off is left out."""
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("}\n")]
    return [(line["step"], line["loss"]) for line in map(json.loads, lines) if "step_seconds" in line]


def read_broken(run: Path) -> Broken:
    """The two starts of a run, split where the step number decreases."""
    made = step_losses(run)
    again = next((index for index in range(1, len(made)) if made[index][0] <= made[index - 1][0]), None)
    if again is None:
        raise ValueError(f"{run}: no step was made twice: the run was not killed past a checkpoint, or not resumed")
    return Broken(dict(made[:again]), dict(made[again:]))


def largest_difference(found: dict[int, float], expected: dict[int, float]) -> float:
    """Relative, over the steps of both."""
    return max(abs(found[step] - expected[step]) / abs(expected[step]) for step in found.keys() & expected.keys())


def draw(whole: dict[int, float], broken: Broken, before: str, after: str) -> str:
    """The picture as SVG.

    Args:
        whole: Losses of the uninterrupted run, by step.
        broken: Losses of the interrupted run.
        before: Name of the interrupted run's first layout.
        after: Name of its second layout.
    """
    last = max(whole)
    low, high = min([*whole.values(), *broken.losses.values()]), max([*whole.values(), *broken.losses.values()])
    unit = (high - low) / 20 or 1.0
    low, high = low - unit, high + unit

    def x(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def line(name: str, losses: dict[int, float]) -> str:
        points = " L".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(losses.items()))
        return f'<path class="{name}" d="M{points}"/>'

    def text(words: str, at: tuple[float, float], name: str = "", anchor: str = "start") -> str:
        return f'<text class="{name}" x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

    foot, killed, resumed = HEIGHT - BOTTOM, broken.killed_after, broken.resumed_after
    step_tick = next(tick for tick in TICKS if last / tick <= MOST_TICKS or tick == TICKS[-1])
    loss_tick = next(tick / 10 for tick in TICKS if (high - low) / (tick / 10) <= MOST_TICKS or tick == TICKS[-1])
    parts = [f'<rect class="ground" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6"/>']
    for number in range(int(low // loss_tick) + 1, int(high // loss_tick) + 1):
        level = y(number * loss_tick)
        parts += [f'<path class="grid" d="M{LEFT},{level:.1f} H{WIDTH - RIGHT}"/>']
        parts += [text(f"{number * loss_tick:g}", (LEFT - 8, level + 4), "quiet", "end")]
    parts += [text(str(step), (x(step), foot + 18), "quiet", "middle") for step in range(0, last + 1, step_tick)]
    kept = {step: loss for step, loss in broken.before.items() if step <= resumed}
    lost = {step: loss for step, loss in broken.before.items() if step >= resumed}
    difference = largest_difference(broken.losses, whole)
    middle = (LEFT + WIDTH - RIGHT) / 2
    centre = (TOP + foot) / 2
    parts += [
        f'<path class="axis" d="M{LEFT},{TOP} V{foot} H{WIDTH - RIGHT}"/>',
        text("optimizer step", (middle, HEIGHT - 12), "", "middle"),
        f'<text x="18" y="{centre:.0f}" text-anchor="middle" transform="rotate(-90 18 {centre:.0f})">loss, nats per token</text>',
        text("killed, resumed under another plan: one curve", (LEFT, 24), "title"),
        text(f"largest relative difference from the uninterrupted run: {difference:.1e}", (LEFT, 42), "quiet"),
        line("whole", whole),
        line("before", kept),
        line("after", ({resumed: broken.before[resumed]} if resumed in broken.before else {}) | broken.after),
        line("lost", lost),
        f'<path class="kill" d="M{x(killed):.1f},{TOP} V{foot}"/>',
        text(f"kill -9 after step {killed}", (x(killed) + 6, TOP + 14)),
        text(f"resumed from step {resumed}", (x(killed) + 6, TOP + 31), "quiet"),
        *_legend({"whole": "one process, uninterrupted", "before": before, "lost": "lost, made again", "after": after}),
    ]
    words = f"Loss by step: killed after step {killed} under {before}, resumed from step {resumed} under {after}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
    return "\n".join([head, f"<title>{escape(words)}</title>", f"<style>{STYLE}\n</style>", *parts, "</svg>"]) + "\n"


def _legend(names: dict[str, str]) -> list[str]:
    """Below the upper right corner, where a falling curve leaves room."""
    left, top = WIDTH - RIGHT - 212, TOP + 62
    parts = []
    for row, (name, words) in enumerate(names.items()):
        level = top + 20 * row
        parts.append(f'<path class="{name}" d="M{left},{level} h26"/><text x="{left + 34}" y="{level + 4}">{escape(words)}</text>')
    return parts


def main(out: Path, picture: Path) -> None:
    """Draw what the demo's two runs have left."""
    picture.write_text(draw(dict(step_losses(out / "one")), read_broken(out / "broken"), BEFORE, AFTER))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
