"""What says that two runs read the same tokens, without reading them; needs no torch.

A token file's header has the SHA-256 of everything behind it, made when the file was written. `megarun data inspect` reads the file and
compares; a start and a resume compare headers.
"""

from __future__ import annotations

from dataclasses import dataclass

SHOWN_DIGITS = 16


@dataclass(frozen=True, slots=True)
class DataFile:
    """One token file of a run's data.

    Attributes:
        name: The file's, without folders; for people: a file that was moved or renamed is the same data.
        payload_sha256: As its header states.
        num_tokens: Likewise.
        weight: Rows of it in each block of the mix, without the weights' common factor; 1 of a file that is read alone.
    """

    name: str
    payload_sha256: str
    num_tokens: int
    weight: int

    @property
    def key(self) -> tuple[str, int, int]:
        """What is compared."""
        return self.payload_sha256, self.num_tokens, self.weight

    def text(self) -> str:
        """For a person."""
        digest = f"payload sha256 {self.payload_sha256[:SHOWN_DIGITS]}…" if self.payload_sha256 else "no payload sha256"
        return f"{self.name}={self.weight}: {self.num_tokens:,} tokens, {digest}"


DataFiles = tuple[DataFile, ...]
"""In the order of the mix, which decides whose rows come where."""


def same_data(one: DataFiles, other: DataFiles) -> bool:
    """Whether both give the same rows."""
    return [file.key for file in one] == [file.key for file in other]


def data_text(files: DataFiles) -> str:
    """All files in one line."""
    return "; ".join(file.text() for file in files) or "none"
