"""A plan diff as a review comment: verdict first, bounded, and marked so that a bot can update it in place."""

from collections.abc import Iterator

from megaplan.api.parts import JobParts
from megaplan.cli.diff_text import change_sections, column_rows, flip_texts, rank_blocks, ranks_label
from megaplan.cli.parts_text import part_tables
from megaplan.cli.time_text import change_line
from megaplan.foreign import markdown
from megaplan.layout.step_time import PlannedTime
from megaplan.plan.diff import PlanDiff, RankChange
from megaplan.plan.diff_document import host_lines
from megaplan.terminal.table import markdown_table
from megaplan.units import format_gib

StepTimePair = tuple[PlannedTime | str, PlannedTime | str]
"""Step times before and after."""
MARKER = "<!-- megaplan diff -->"
MAX_CHARACTERS = 65_535
"""A GitHub comment is limited to 65,536 characters."""
_NOTICE = "\n\n**Truncated:** {dropped:,} more characters; run `megaplan diff` for the rest.\n"


def diff_markdown(diff: PlanDiff, times: StepTimePair, parts: tuple[JobParts, JobParts]) -> str:
    """The complete comment, at most `MAX_CHARACTERS` long, with a notice if it is truncated."""
    text = "\n".join(_lines(diff, times, parts)) + "\n"
    if len(text) <= MAX_CHARACTERS:
        return text
    kept = text[: MAX_CHARACTERS - 400].rpartition("\n")[0]
    closing = "\n\n</details>" if kept.count("<details>") > kept.count("</details>") else ""
    return kept + closing + _NOTICE.format(dropped=len(text) - len(kept))


def _lines(diff: PlanDiff, times: StepTimePair, parts: tuple[JobParts, JobParts]) -> Iterator[str]:
    before, after = diff.names
    yield MARKER
    yield f"### megaplan: {diff.verdict}"
    yield ""
    yield f"`{markdown(before)}` → `{markdown(after)}`, plan `{_short(diff.digests[0])}` → `{_short(diff.digests[1])}`"
    alarms = [f"**digest:** {markdown(file)}: {found.summary}" for file, found in diff.tampered]
    alarms += [f"**{markdown(text)}**" for text, _ in flip_texts(diff)]
    if diff.stale:
        alarms.append(f"**stale reason:** changed since the manual split was decided: {markdown(', '.join(diff.stale))}")
    if alarms:
        yield ""
        yield from (f"- {alarm}" for alarm in alarms)
    if not diff.same:
        yield ""
        yield markdown(change_line(*times))
    if diff.ranks:
        yield ""
        yield from markdown_table([("ranks", "peak before GiB", "peak after GiB", "headroom after GiB"), *map(_summary, diff.ranks)])
    for title, lines in change_sections(diff):
        yield ""
        yield f"<details><summary>{title.capitalize()} ({len(lines)})</summary>"
        yield ""
        yield from (f"- {markdown(line)}" for line in lines)
        yield ""
        yield "</details>"
    for rank, sentence in rank_blocks(diff):
        yield ""
        if sentence:
            yield sentence
            continue
        yield f"<details><summary>{ranks_label(rank)}, bytes by column</summary>"
        yield ""
        yield from markdown_table([("column", "before", "after", "change"), *column_rows(rank)])
        yield ""
        yield "</details>"
    for title, rows in () if diff.same else part_tables(*parts):
        yield ""
        yield f"<details><summary>{title.capitalize()}</summary>"
        yield ""
        yield from markdown_table(rows)
        yield ""
        yield "</details>"
    reasons = host_lines(diff)
    if reasons:
        yield ""
        yield "<details><summary>Why two hosts differ</summary>"
        yield ""
        yield from markdown_table([("column", "before", "after"), *reasons], left=(0, 1, 2))
        yield ""
        yield "</details>"


def _summary(rank: RankChange) -> tuple[str, str, str, str]:
    before = format_gib(rank.before.peak_bytes) if rank.before else "none"
    if rank.after is None:
        return ranks_label(rank), before, "none", ""
    return ranks_label(rank), before, format_gib(rank.after.peak_bytes), format_gib(rank.after.headroom_bytes)


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
