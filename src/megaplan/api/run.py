"""`megaplan.run`: a whole training run."""

from typing import Any

from megaplan.api.load import FilePath, Source, load
from megaplan.budget.peaks import build_budget
from megaplan.goodput.estimate import run_estimate
from megaplan.goodput.values import RunEstimate
from megaplan.layout.step_time import planned_time
from megaplan.spec.models import Run

KEYS = frozenset(Run.model_fields)


def run(
    source: Source, /, *changes: str, costs: FilePath | None = None, device_file: FilePath | None = None, **overrides: Any
) -> RunEstimate:
    """Estimate a whole training run: days, cost and energy, checkpoints, the best interval of saves, and goodput.

    Args:
        source: A spec, plan or Hugging Face config as for `megaplan.load`, or a job that was loaded.
        *changes: `KEY=VALUE` texts.
        costs: A costs file by which a spec is cut.
        device_file: A file that `megaplan calibrate -o` wrote.
        **overrides: Keys of the section `run`, `tokens="2T", mtbf="30000h"`, and other changes with two underscores for the dot.

    Returns:
        The run. Times are in seconds unless the name says otherwise; ends of a spread follow from the step's 80 % interval.

    Raises:
        MegaplanError: Every error of the source and the changes; MP470, a quantity cannot be read; MP471, the step has no time; MP472:
            interruptions are more frequent than finished saves.

    Examples:
        >>> import megaplan
        >>> found = megaplan.run("plans/nam56r-8xh200.yaml", tokens="20B", price=2.5)
        >>> found.steps, found.checkpoints.whole_bytes == sum(stage.bytes for stage in found.checkpoints.ranks)
        (19074, True)
        >>> found.interval.goodput >= max(found.interval.goodput_at_half, found.interval.goodput_at_double)
        True
    """
    named = {f"run__{key}" if key in KEYS else key: value for key, value in overrides.items()}
    job = load(source, *changes, costs=costs, device_file=device_file, **named)
    spec, inventory, layout = job.spec, job.inventory, job.layout
    return run_estimate(spec, inventory, layout, build_budget(spec, inventory, layout), planned_time(spec, job.spans, inventory))
