"""Megatron's pipeline layout of a GPT model: stages of `E` embedding, `t` layer, `m` prediction module and `L` loss between `|`.

Source: `megatron/core/transformer/pipeline_parallel_layer_layout.py` at d98e8a64. `(…)*n` and `x*n` repeat, parentheses first and never
inside each other; commas mean nothing. Columns count from 1.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError

TOKENS = "EtmL"
NAMES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Tokens of the list form."""
_MOST = 1 << 17
_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_LISTS = re.compile(r"\[([01,]*)\](?:\*(\d+))?")
_REPEATED = re.compile(r"([EtmL|])\*(\d+)")


def parse_layout(text: str, where: Location | None = None) -> tuple[str, ...]:
    """Tokens of each stage.

    Raises:
        MegaplanError: MP912.
    """
    at = where or Location(key="pipeline_model_parallel_layout")
    found = list(_faults(text, at))
    if found:
        raise MegaplanError(found)
    plain = text.replace(",", "").replace(" ", "")
    for repeated in (_GROUP, _REPEATED):
        size = len(plain) + sum(len(match[1]) * min(int(match[2]), _MOST) for match in repeated.finditer(plain))
        if size > _MOST:
            raise MegaplanError(
                [diagnostic("MP912", f"{text!r} has more than {_MOST:,} tokens when it is written out", at, ("repeat less",))]
            )
        plain = repeated.sub(lambda match: match[1] * int(match[2]), plain)
    return tuple(plain.split("|"))


def check_layout(stages: Sequence[str], pp: int, num_layers: int, num_modules: int, where: Location | None = None) -> None:
    """Megatron's conditions on the stages of a model.

    Raises:
        MegaplanError: MP911; all that are found.
    """
    at = where or Location(key="pipeline_model_parallel_layout")
    said = []
    if len(stages) % pp:
        said.append(f"{len(stages)} stages, pp = {pp}, and {len(stages)} % {pp} = {len(stages) % pp}")
    flat = "".join(stages)
    if flat.count("E") != 1 or not stages[0].startswith("E"):
        said.append("E must be first, and occur once")
    if flat.count("L") != 1 or not stages[-1].endswith("L"):
        said.append("L must be last, and occur once")
    if flat.count("t") != num_layers:
        said.append(f"{flat.count('t')} layers in the layout, num_layers = {num_layers}")
    if flat.count("m") != num_modules:
        said.append(f"{flat.count('m')} prediction modules in the layout, mtp_num_layers = {num_modules}")
    owners = [index for index, stage in enumerate(stages) if "m" in stage]
    if len(owners) > 1:
        said.append(f"prediction modules on stages {', '.join(map(str, owners))}: all must be on one")
    if owners and owners[0] < len(stages) - pp:
        said.append(f"prediction modules on stage {owners[0]}: they must be on the last virtual stage of a rank")
    if flat.rfind("t") > flat.find("m") >= 0:
        said.append("a layer is after a prediction module")
    if said:
        raise MegaplanError([diagnostic("MP911", "\n".join(said), at, ("megaplan export PLAN --to megatron writes a layout that fits",))])


def format_layout(stages: Sequence[str]) -> str:
    """The text of stages: runs of a token as `t*3`."""
    return "|".join("".join(f"{token}*{count}" if count > 2 else token * count for token, count in _runs(stage)) for stage in stages)


def layer_kinds(frequency: Any, layers: int, moe: bool) -> str:
    """One letter a layer of a GPT model, `E` or `-`, by `--moe-layer-freq`: a period, or a list of flags written as Python sums."""
    if not moe:
        return "-" * layers
    if isinstance(frequency, int) or str(frequency).isdigit():
        return "".join("E" if index % int(frequency) == 0 else "-" for index in range(layers))
    return flag_list(frequency).replace("0", "-").replace("1", "E")


def flag_list(text: Any) -> str:
    """Flags, 0 and 1, of a list, or of a sum and product of lists as Python writes them: `([0]*3+[1]*11)*2`."""
    plain = re.sub(r"\s", "", str(list(text) if isinstance(text, tuple) else text))
    while (group := re.search(r"\(([^()]*)\)(?:\*(\d+))?", plain)) is not None:
        plain = plain[: group.start()] + f"[{','.join(_plain_flags(group[1]))}]*{group[2] or 1}" + plain[group.end() :]
    return _plain_flags(plain)


def _plain_flags(text: str) -> str:
    return "".join("".join(re.findall("[01]", items)) * min(int(times or 1), _MOST) for items, times in _LISTS.findall(text))


def even_sizes(arguments: Mapping[str, Any], layers: int, pp: int) -> list[int]:
    """Layers of each virtual stage of a GPT model without a layout, in model order."""
    get = arguments.get
    per = get("num_layers_per_virtual_pipeline_stage")
    first, last = get("decoder_first_pipeline_num_layers"), get("decoder_last_pipeline_num_layers")
    ends = bool(get("account_for_embedding_in_pipeline_split")), bool(get("account_for_loss_in_pipeline_split"))
    counted = layers + sum(ends)
    ranks = [0] * pp
    free = counted - (first or 0) - (last or 0)
    between = pp - bool(first) - bool(last)
    for rank in range(pp):
        ranks[rank] = free // between if between > 0 else 0
    if first:
        ranks[0] = int(first)
    if last:
        ranks[-1] = int(last)
    virtual = int(get("num_virtual_stages_per_pipeline_rank") or (counted // pp // int(per) if per and not first else 0))
    if per and first:
        virtual = ranks[min(1, pp - 1)] // int(per)
    virtual = max(virtual, 1)
    sizes = [ranks[rank] // virtual for _ in range(virtual) for rank in range(pp)]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return sizes


def _runs(stage: str) -> Iterator[tuple[str, int]]:
    for token, run in groupby(stage):
        yield token, len(list(run))


def _faults(text: str, at: Location) -> Iterator[Diagnostic]:
    depth, opened = 0, 0
    for column, token in enumerate(text, start=1):
        if token == "(":
            depth, opened = depth + 1, column
            if depth > 1:
                yield diagnostic("MP912", f"{text!r}: '(' at column {column} inside another", at, ("write the inner group out",))
                return
        elif token == ")":
            depth -= 1
            if depth < 0 or not re.match(r"\)\*\d+", text[column - 1 :]):
                why = "closes nothing" if depth < 0 else "is followed by no *n"
                yield diagnostic("MP912", f"{text!r}: ')' at column {column} {why}", at, ("(tt|)*3",))
                return
        elif token == "*":
            if column == 1 or text[column - 2] not in f"){TOKENS}|" or not text[column : column + 1].isdigit():
                yield diagnostic("MP912", f"{text!r}: '*' at column {column} is not a token times a number", at, ("t*3",))
                return
        elif token.isdigit():
            if not re.search(r"\*\d*$", text[: column - 1]):
                yield diagnostic("MP912", f"{text!r}: {token!r} at column {column} is a number without a token to repeat", at, ("t*3",))
                return
        elif token not in f"{TOKENS}|, ":
            yield diagnostic("MP912", f"{text!r}: {token!r} at column {column}; the tokens are E, t, m, L and '|'", at, ("Et*3|t*3L",))
            return
    if depth:
        yield diagnostic("MP912", f"{text!r}: '(' at column {opened} is never closed", at, ("(tt|)*3",))
