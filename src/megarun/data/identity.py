"""The identity of a run's data, to compare runs without reading tokens; needs no torch.

A token file's header has the SHA-256 of all bytes after it, computed when the file was written. `megarun data inspect` verifies it; the
start of a run and a resume only compare headers.
"""

from dataclasses import dataclass

SHOWN_DIGITS = 16
TOKENIZER = "tokenizer.json"
"""The tokenizer of a run's first token file, in the folder of the run."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One token file of a run's data.

    Attributes:
        name: File name without folders, for display only: a moved or renamed file is the same data.
        payload_sha256: SHA-256 of the payload, from the header.
        num_tokens: Number of tokens, from the header.
        weight: Rows of the file in each block of the mix, with common factors of the weights removed; 1 for a single file.
    """

    name: str
    payload_sha256: str
    num_tokens: int
    weight: int

    @property
    def key(self) -> tuple[str, int, int]:
        """The fields that are compared."""
        return self.payload_sha256, self.num_tokens, self.weight

    def text(self) -> str:
        """Description of the file for messages."""
        digest = f"payload sha256 {self.payload_sha256[:SHOWN_DIGITS]}…" if self.payload_sha256 else "no payload sha256"
        return f"{self.name}={self.weight}: {self.num_tokens:,} tokens, {digest}"


DataFiles = tuple[DataFile, ...]
"""Token files in the order of the mix, which decides the order of rows."""


def same_data(one: DataFiles, other: DataFiles) -> bool:
    """True if both give the same rows."""
    return [file.key for file in one] == [file.key for file in other]


def data_text(files: DataFiles) -> str:
    """All files in one line."""
    return "; ".join(file.text() for file in files) or "none"
