"""`megaplan.rl`: a post-training plan."""

from typing import Any

from megaplan.api.load import FilePath, Source, load
from megaplan.post_training.estimate import rl_estimate
from megaplan.post_training.values import RlEstimate


def rl(
    source: Source, /, *changes: str, costs: FilePath | None = None, device_file: FilePath | None = None, **overrides: Any
) -> RlEstimate:
    """Estimate reinforcement learning of a model: memory by phase, time of an iteration, and idle devices.

    Args:
        source: A spec or plan with the section `post_training`, as for `megaplan.load`, or a job that was loaded.
        *changes: `KEY=VALUE` texts.
        costs: A costs file by which a spec is cut.
        device_file: A file that `megaplan calibrate -o` wrote.
        **overrides: Changes with two underscores for the dot: `post_training__rollout__tp=2`.

    Returns:
        The plan. Sizes are bytes of one device, or of one node's host memory; times are seconds of an iteration.

    Raises:
        MegaplanError: Every error of the source and the changes; MP471, the training step has no time; MP850, an update cannot be made;
            MP851, there is no section `post_training`; MP852, the engine has no room for a sequence.

    Examples:
        >>> import megaplan
        >>> found = megaplan.rl("plans/llama-3.1-8b-rl.yaml")
        >>> found.fits, found.peak_bytes == max(phase.total_bytes for phase in found.memory)
        (True, True)
        >>> all(phase.total_bytes == sum(phase.columns.values()) for phase in found.memory)
        True
    """
    job = load(source, *changes, costs=costs, device_file=device_file, **overrides)
    return rl_estimate(job.spec, job.inventory, job.spans)
