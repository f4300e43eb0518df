"""The demo's closing table and picture: the killed and resumed run compared with one process, and the corpus' unigram entropy.

Exits 1 if a loss before the kill is more than 1e-5 (relative) from one process's, or one of the steps that both layouts made from the other
layout's, or if the last loss is not below the entropy. Over all steps the difference is printed and not judged: each layout sums in another
order, and at the demo's learning rate training makes more of that rounding with every step.
"""

import json
import subprocess
import sys
from pathlib import Path

from demo_curve import AFTER, BEFORE, draw, largest_difference, read_broken, step_losses
from rich.console import Console
from rich.table import Table

TOLERANCE = 1e-5


def main(out: Path) -> int:
    """Print the table and draw the picture; the exit status says whether the claims hold."""
    whole, broken = dict(step_losses(out / "one")), read_broken(out / "broken")
    inspected = subprocess.run(
        [sys.executable, "-m", "megarun", "data", "inspect", str(out / "headers.tokens"), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    entropy = json.loads(inspected.stdout)["unigram_entropy_nats"]
    killed, resumed, last = broken.killed_after, broken.resumed_after, max(whole)

    table = Table(title="loss, nats per token")
    for title in ("step", "one process", f"{BEFORE}, killed", f"{AFTER}, resumed", "difference"):
        table.add_column(title, justify="right")
    shown = {1, resumed, resumed + 1, killed, killed + 1, last, *range(10, last, 10)}
    for step in sorted(shown):
        columns = [f"{run[step]:.6f}" if step in run else "" for run in (whole, broken.before, broken.after)]
        table.add_row(str(step), *columns, f"{largest_difference({step: broken.losses[step]}, whole):.1e}")
    Console().print(table)
    picture = out / "curve.svg"
    picture.write_text(draw(whole, broken, BEFORE, AFTER))

    twice = {step: loss for step, loss in broken.before.items() if step in broken.after}
    claims = {
        f"steps 1 to {killed} before the kill, to one process": largest_difference(broken.before, whole),
        f"steps {min(twice)} to {max(twice)}, made by both layouts": largest_difference(broken.after, twice),
    }
    within = True
    for what, difference in claims.items():
        within &= difference <= TOLERANCE
        print(f"{what}: largest relative difference {difference:.1e}, {'within' if difference <= TOLERANCE else 'ABOVE'} {TOLERANCE:.0e}")
    print(f"all {last} steps, to one process: largest relative difference {largest_difference(broken.losses, whole):.1e}")
    learned = broken.losses[last] < entropy
    print(f"last loss {broken.losses[last]:.4f} is {'below' if learned else 'NOT BELOW'} the unigram entropy {entropy:.4f}")
    print(f"picture: {picture}")
    return 0 if within and learned and len(whole) == len(broken.losses) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
