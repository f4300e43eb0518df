"""`megarun eval`: the loss of a token file under a checkpoint."""

from pathlib import Path

import torch

from megaplan.terminal import output
from megarun.cli.checkpoint import checkpoints_at
from megarun.sampling.decode import saved_job
from megarun.sampling.evaluate import evaluate
from megarun.training.prepare import open_tokens

FORMAT = "megarun.eval/1"


def write_evaluation(run: str, data: Path, most_rows: int | None, *, as_json: bool) -> int:
    """Print loss, perplexity and bits per byte.

    Raises:
        MegaplanError: MP649 without a checkpoint, an error of `open_tokens` if the file does not fit the model, or one of both cannot be
            read.
    """
    checkpoint = checkpoints_at(run)[0]
    saved = saved_job(checkpoint)
    source = open_tokens(data, saved.spec)  # opened before the weights, which take longer
    found = evaluate(checkpoint, saved, source, most_rows, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if as_json:
        numbers = {"rows": found.rows, "labels": found.labels, "loss": found.loss, "perplexity": found.perplexity}
        more = {"bits_per_byte": found.bits_per_byte, "bytes_per_token": found.bytes_per_token}
        output.write_json({"format": FORMAT, "checkpoint": str(checkpoint), "data": str(data), **numbers, **more})
        return 0
    output.write(f"{checkpoint}\n{data}: {found.rows:,} rows, {found.labels:,} labels\n\n")
    output.write(f"loss           {found.loss:.4f} nats a label\n")
    output.write(f"perplexity     {found.perplexity:,.2f}\n")
    output.write(f"bits per byte  {found.bits_per_byte:.4f}, at {found.bytes_per_token:.2f} bytes per token\n")
    return 0
