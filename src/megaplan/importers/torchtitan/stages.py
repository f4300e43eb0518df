"""torchtitan's division of a model into stages: by modules, by split points, or by its own rules."""

from collections.abc import Sequence
from itertools import pairwise

from megaplan.importers.torchtitan.config import JobConfig
from megaplan.importers.torchtitan.keys import Age

PARTS, POINTS = "parallelism.module_fqns_per_model_part", "parallelism.pipeline_parallel_split_points"
PER_STAGE, SCHEDULE = "parallelism.pipeline_parallel_layers_per_stage", "parallelism.pipeline_parallel_schedule"
FIRST_LESS = "parallelism.pipeline_parallel_first_stage_less_layers"
LAST_LESS = "parallelism.pipeline_parallel_last_stage_less_layers"
NAMES = "made of layers.0, layers.1 and so on"
MAX_STAGES = 2**14
"""Largest number of stages; each has a block, and a mistyped number makes no long list."""
Starts = list[int]
"""The first block of each stage."""


def read_stages(config: JobConfig, blocks: int, pp: int, *, looped: bool) -> Starts:
    """The first block of every stage, in model order.

    If they cannot be read, an error is added to the file's, and stages of similar size are returned instead.

    Args:
        config: The file.
        blocks: Transformer blocks.
        pp: Pipeline ranks.
        looped: True if the schedule has several stages per rank.
    """
    parts, points = config.value(PARTS), config.names(POINTS)
    least = pp * (2 if looped else 1)
    if parts is not None or points:
        found = _of_points(config, points) if parts is None else _of_parts(config, parts, blocks)
        return _split_points(blocks, least) if found is None else found
    each = config.value(PER_STAGE)
    if config.age is Age.TOML_2024:
        return _split_points(blocks, least)
    first, last = (config.whole(key, 0) for key in (FIRST_LESS, LAST_LESS))
    count = least if each is None else -(-(blocks + first + last) // config.whole(PER_STAGE))
    if count % pp or (not looped and count != pp):
        config.refuse(PER_STAGE, f"it makes {count} stages, and there are {pp} ranks")
        count = least
    return _weighted(config, blocks, count, first, last)


def _weighted(config: JobConfig, blocks: int, stages: int, first: int, last: int) -> Starts:
    """`generate_llm_fqn_per_model_part`: even shares, each end counted as some blocks; earlier stages take the remainder."""
    share, rest = divmod(blocks + first + last, stages)
    sizes = [share + (index < rest) for index in range(min(stages, MAX_STAGES))]
    sizes[0] -= first
    sizes[-1] -= last
    if stages > MAX_STAGES or min(sizes) < 1:
        config.refuse(FIRST_LESS, f"{blocks} blocks on {stages} stages leave one without a block", f"fewer stages than {blocks}")
        return _split_points(blocks, stages)
    return _starts(sizes)


def _split_points(blocks: int, stages: int) -> Starts:
    """`generate_split_points` of 2024: the first and the last stage take an even share, middle stages take the remainder, one each."""
    stages = min(stages, MAX_STAGES)
    share, rest = divmod(blocks, stages)
    sizes = [share, *(share + (index < rest) for index in range(stages - 2))]
    return _starts([*sizes, blocks - sum(sizes)])


def _starts(sizes: list[int]) -> Starts:
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    return starts


def _of_points(config: JobConfig, points: Sequence[str]) -> Starts | None:
    blocks = [_block(point) for point in points]
    if None in blocks:
        config.wrong(POINTS, NAMES)
        return None
    return [0, *(block for block in blocks if block is not None)]


def _of_parts(config: JobConfig, parts: object, blocks: int) -> Starts | None:
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        config.wrong(PARTS, "a list of lists of module names")
        return None
    layers = [[_block(name) for name in part if str(name).startswith("layers.")] for part in parts]
    found = [block for part in layers for block in part]
    if None in found:
        config.wrong(PARTS, NAMES)
    elif found != list(range(blocks)) or not all(layers):
        config.refuse(PARTS, f"its stages do not hold blocks 0 to {blocks - 1} in order, one or more each")
    else:
        return [block for block, *_ in layers if block is not None]
    return None


def _block(name: object) -> int | None:
    number = str(name).removeprefix("layers.")
    return int(number) if number.isdecimal() else None


def spans_of_blocks(starts: Starts, blocks: int) -> list[list[int]]:
    """Spans of layers, two per block."""
    return [[2 * start, 2 * stop] for start, stop in pairwise([*starts, blocks])]
