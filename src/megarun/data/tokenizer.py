"""Tokenizers: byte-level BPE trained on the corpus, and plain bytes. Neither needs a download; both encode every text.

Both are written as a `tokenizers` JSON, so `tokenizers.Tokenizer.from_file` reads either; bytes are BPE without merges.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from megarun.data.corpus import Corpus
from megarun.data.format import MIN_VOCAB_SIZE
from megarun.errors import refusal

END_OF_DOCUMENT = "<|end_of_document|>"
MAX_TRAINED_VOCAB_SIZE = 2**24  # the trainer reserves memory for every id, and aborts the process if there is too little
SAMPLE_BYTES = 4_000_000  # a larger sample hardly changes a vocabulary of a few ten thousand, and takes longer
SEGMENT_CHARACTERS = 1 << 20
# The pre-tokenizer always separates a line end that precedes a printable character, whatever is before it, so splitting a text in front
# of that line end does not change its tokens.
_ENDS = (END_OF_DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "<|endofdocument|>", "<|im_end|>", "<eos>", "</s>")
"""Tokens that end a document, of this module and of published tokenizers, in the order in which they are looked for."""
_CUT = re.compile(r"\n(?=[!-~])")


class TokenizerKind(StrEnum):
    """Kind of tokenizer."""

    BPE = "bpe"
    BYTES = "bytes"


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer and its training sample.

    Attributes:
        kind: BPE or bytes.
        tokenizer: The library's object.
        end_of_document_id: Id that ends every document; no text encodes to it.
        sample_documents: Number of documents on which it was trained; some are used partly.
        sample_bytes: UTF-8 bytes that it was trained on.
        content: JSON of the file that it was read from; empty if it was made here.
    """

    kind: TokenizerKind
    tokenizer: Tokenizer
    end_of_document_id: int
    sample_documents: int = 0
    sample_bytes: int = 0
    content: bytes = b""

    @cached_property
    def vocab_size(self) -> int:
        """Vocabulary size; ids are 0 … vocab_size − 1."""
        return max(self.tokenizer.get_vocab().values()) + 1  # published ones leave ids out

    @property
    def json(self) -> bytes:
        """Contents of the tokenizer's JSON file."""
        return self.content or self.tokenizer.to_str(pretty=True).encode() + b"\n"

    @property
    def sha256(self) -> str:
        """SHA-256 of the JSON."""
        return hashlib.sha256(self.json).hexdigest()

    @property
    def is_own(self) -> bool:
        """True if it has this module's pre-tokenizer, which texts may be cut for."""
        return self.tokenizer.token_to_id(END_OF_DOCUMENT) == self.end_of_document_id

    @cached_property
    def id_bytes(self) -> NDArray[np.int64]:
        """UTF-8 length of each id, int64 [vocab_size]: a character of the byte alphabet is one byte."""
        return np.array([len(self.tokenizer.id_to_token(index) or "") for index in range(self.vocab_size)], dtype=np.int64)

    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Ids of each text, without the end of document."""
        if self.kind is TokenizerKind.BYTES:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]
        segments = [list(segments_of(text)) if self.is_own else [text] for text in texts]
        encoded = iter(self.tokenizer.encode_batch_fast([part for parts in segments for part in parts], add_special_tokens=False))
        return [np.array([token for _ in parts for token in next(encoded).ids], dtype=np.int64) for parts in segments]


def check_vocab_size(kind: TokenizerKind, vocab_size: int) -> None:
    """Refuse a vocabulary that the tokenizer cannot have.

    Raises:
        MegaplanError: MP618.
    """
    if kind is TokenizerKind.BYTES and vocab_size != MIN_VOCAB_SIZE:
        detail = f"--tokenizer bytes, --vocab-size {vocab_size}: bytes have {MIN_VOCAB_SIZE} ids"
        raise refusal("MP618", detail, "--vocab-size", ("omit --vocab-size",))
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_TRAINED_VOCAB_SIZE:
        bounds = f"{MIN_VOCAB_SIZE:,} <= --vocab-size <= {MAX_TRAINED_VOCAB_SIZE:,}"
        raise refusal("MP618", f"--vocab-size = {vocab_size:,}; {bounds}", "--vocab-size", (f"--vocab-size {MIN_VOCAB_SIZE}",))


def bytes_tokenizer() -> TrainedTokenizer:
    """Ids 0 … 255 are the bytes of UTF-8, 256 is the end of document."""
    letters = byte_letters()
    tokenizer = _byte_level(BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return TrainedTokenizer(TokenizerKind.BYTES, tokenizer, len(letters))


def read_tokenizer(path: Path, end: str | None = None) -> TrainedTokenizer:
    """A tokenizer of a JSON file, as `tokenize` and published models have it.

    Args:
        path: The file.
        end: Token that ends a document; else the first one of the usual names that it has.

    Raises:
        MegaplanError: MP680, the file cannot be read, or no token ends a document.
    """
    hints = ("--tokenizer corpus.tokens.tokenizer.json",)
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library has no specific exception class
        raise refusal("MP680", f"{path}: {str(error).splitlines()[0]}", hints=hints, file=str(path)) from None
    names = (end,) if end is not None else _ENDS
    ids = tokenizer.get_vocab()
    found = next((each for each in names if each in ids), None)
    if found is None:
        detail = f"{path}: it has none of the tokens {', '.join(names)}"
        raise refusal("MP680", detail, hints=("--end-of-document TOKEN",), file=str(path))
    if max(ids.values()) + 1 < MIN_VOCAB_SIZE:
        raise refusal("MP680", f"{path}: ids up to {max(ids.values())}, and a token file has at least {MIN_VOCAB_SIZE}", file=str(path))
    tokenizer.encode_special_tokens = True  # text that spells a special token is encoded as ordinary text
    own_bytes = len(ids) == MIN_VOCAB_SIZE and found == END_OF_DOCUMENT
    kind = TokenizerKind.BYTES if own_bytes else TokenizerKind.BPE
    return TrainedTokenizer(kind, tokenizer, ids[found], content=content)


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """The id that ends a document, by the usual names; None if it has none of them."""
    return next((found for name in _ENDS if (found := tokenizer.token_to_id(name)) is not None), None)


def train_bpe(corpus: Corpus, vocab_size: int) -> TrainedTokenizer:
    """Train byte-level BPE on a sample of the corpus, deterministically.

    The sample is every n-th document, with the smallest n that keeps it within SAMPLE_BYTES, and ends at SAMPLE_BYTES. The vocabulary is
    smaller than `vocab_size` if no further pair of the sample occurs twice.

    Args:
        corpus: The documents.
        vocab_size: Number of ids: the end of document (id 0), the 256 bytes, and the merges.
    """
    tokenizer = _byte_level(BPE())
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(END_OF_DOCUMENT, special=True, normalized=False)],
        initial_alphabet=byte_letters(),
    )
    sample = list(sample_of(corpus))
    tokenizer.train_from_iterator(sample, trainer=trainer)
    num_bytes = sum(len(text.encode()) for text in sample)
    return TrainedTokenizer(TokenizerKind.BPE, tokenizer, tokenizer.get_vocab()[END_OF_DOCUMENT], len(sample), num_bytes)


def sample_of(corpus: Corpus, sample_bytes: int = SAMPLE_BYTES) -> Iterator[str]:
    """Evenly spread documents of at most `sample_bytes` in total; the last may be truncated."""
    stride = max(1, -(-corpus.num_text_bytes // sample_bytes))
    room = sample_bytes
    for index in range(0, len(corpus.paths), stride):
        content = corpus.text(index).encode()[:room]
        room -= len(content)
        yield content.decode(errors="ignore")  # a cut may fall inside a character
        if room <= 0:
            return


def segments_of(text: str, num_characters: int = SEGMENT_CHARACTERS) -> Iterable[str]:
    """A text in parts that have the same tokens as the text, so that a huge document is encoded in parallel."""
    start = 0
    while len(text) - start > num_characters and (cut := _CUT.search(text, start + num_characters)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def byte_letters() -> list[str]:
    """The printable character of each byte in a byte-level vocabulary.

    Source: the byte-to-character table of GPT-2's tokenizer: printable Latin-1 maps to itself, the rest to U+0100 onwards.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _byte_level(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True  # text that spells the end-of-document token is encoded as text, not as an end
    return tokenizer
