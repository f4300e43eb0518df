"""The launches and other commands of a script."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RecordLine:
    """A command of a script that was recorded or followed.

    Attributes:
        kind: `launch`, `variable` (of a file that launches nothing), `unset` (variables), `absent` (a sourced file, a folder), `failed` (a
            short program), `answered` (a question about the machine) or `other`.
        words: The command; for a variable its name and words.
        said: End of its error output.
        file: Script that ran it.
        line: Line in the script.
        environment: Environment variables of the command.
        lines: Line of each word, if they are known.
        files: Known texts of settings files that the script wrote before the launch, by path.
    """

    kind: str
    words: tuple[str, ...]
    said: str
    file: str
    line: int | None
    environment: Mapping[str, str]
    lines: tuple[int, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recording:
    """Result of running or following a script.

    Attributes:
        rows: Commands that it started, in order.
        status: Exit status; None if it was terminated.
        ended: Reason that it was terminated; empty if it was not.
        said: End of its error output.
    """

    rows: tuple[RecordLine, ...]
    status: int | None
    ended: str
    said: str

    def of_kind(self, *kinds: str) -> tuple[RecordLine, ...]:
        """Rows of the given kinds."""
        return tuple(row for row in self.rows if row.kind in kinds)

    def text(self, name: str) -> str:
        """The text of a script, and after it the commands that it started, one per line, with the values of its variables."""
        try:
            script = Path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            script = ""
        return "\n".join([script, *(" ".join(row.words) for row in self.of_kind("launch", "other"))])
