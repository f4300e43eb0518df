"""Token files: text to tokens, written once, read by memory map; `docs/reference/token-file.md` is the format."""

from megarun.data.mix import TokenMix
from megarun.data.token_file import TokenFile

__all__ = ["TokenFile", "TokenMix"]
