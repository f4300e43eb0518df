"""`megarun sample`: the text with which a checkpoint continues a prompt."""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from megaplan.terminal import output
from megarun.cli.checkpoint import checkpoints_at
from megarun.data.identity import TOKENIZER
from megarun.data.token_file import tokenizer_file
from megarun.data.tokenizer import end_of_document
from megarun.errors import refusal
from megarun.huggingface.describe import read_tokenizer_json, run_tokenizer
from megarun.sampling.decode import Chooser, continuation, load_decoder

FORMAT = "megarun.sample/1"


class Wanted(NamedTuple):
    """A wanted continuation.

    Attributes:
        text: The prompt.
        num_tokens: Most tokens.
        temperature: See `Chooser`.
        top_p: See `Chooser`.
        seed: Seed of the choices.
    """

    text: str
    num_tokens: int
    temperature: float
    top_p: float
    seed: int


def write_sample(run: str, tokenizer: Path | None, wanted: Wanted, *, as_json: bool) -> int:
    """Print the prompt and its continuation, token by token.

    Raises:
        MegaplanError: MP649 without a checkpoint, MP678 if the text cannot be continued, or the checkpoint cannot be read.
    """
    checkpoint, words = checkpoints_at(run)[0], _tokenizer(run, tokenizer)
    prompt = words.encode(wanted.text, add_special_tokens=False).ids
    if not prompt:
        raise refusal("MP678", "the prompt has no token", hints=("megarun sample RUN 'Once there was'",))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = load_decoder(checkpoint, len(prompt) + wanted.num_tokens, device)
    size = decoder.vocab_size
    if max(prompt) >= size:
        raise refusal("MP678", f"a token of the prompt is {max(prompt)}, and the model has {size:,}", file=run)
    chooser = Chooser(words.get_vocab_size(), wanted.temperature, wanted.top_p, torch.Generator().manual_seed(wanted.seed))
    made, shown = list[int](), wanted.text
    if not as_json:
        output.write(shown)
    for token in continuation(decoder, prompt, wanted.num_tokens, chooser, end_of_document(words)):
        made.append(token)
        text = words.decode(prompt + made)
        if not as_json and text.startswith(shown) and not text.endswith("\ufffd"):  # a character of several tokens is still incomplete
            output.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    if as_json:
        document = {"checkpoint": str(checkpoint), "prompt": wanted.text, "text": words.decode(made), "tokens": made}
        output.write_json({"format": FORMAT, **document})
    else:
        output.write("\n")
    return 0


def _tokenizer(run: str, given: Path | None) -> Tokenizer:
    """The tokenizer of a file, or of a token file that has one next to it; by default the one that the run keeps."""
    file = run_tokenizer(run) if given is None else tokenizer_file(given)
    if file is None:
        raise refusal("MP678", f"{run} keeps no {TOKENIZER}", hints=("--tokenizer corpus.tokens",), file=run)
    return read_tokenizer_json(file)
