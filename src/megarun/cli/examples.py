"""Groups of commands, and examples, for help texts."""

from megaplan.terminal.usage import examples_text

TRAIN, MACHINE, FILES = "Train", "Before a run", "Files"
"""Groups of the commands."""
EXAMPLES = {
    "train": (
        "megarun train plan.json --data corpus.tokens --out runs/my --save-every 500",
        "torchrun --standalone --nproc-per-node 8 -m megarun train plan.json --data corpus.tokens --out runs/my --save-every 500",
        "megarun train plan.json --data code.tokens=3 --data web.tokens=1 --out runs/mix --validation-fraction 0.01",
    ),
    "trace": ("megarun trace plan.json", "megarun trace plan.json --stage 0 --top 20"),
    "compile": ("megarun compile plan.json --device h100-sxm --cache kernels",),
    "doctor": ("megarun doctor", "megarun doctor plan.json --out runs/my"),
    "data tokenize": (
        "megarun data tokenize docs -o docs.tokens --tokenizer bytes --include '*.md'",
        "megarun data tokenize src -o code.tokens --vocab-size 32000",
    ),
    "data inspect": ("megarun data inspect corpus.tokens",),
    "sample": (
        "megarun sample runs/my 'Once there was'",
        "megarun sample runs/my 'def main' --tokenizer tokenizer.json --tokens 40 --temperature 0",
    ),
    "eval": ("megarun eval runs/my held-out.tokens", "megarun eval runs/my corpus.tokens --rows 64"),
    "checkpoint list": ("megarun checkpoint list runs/my",),
    "checkpoint inspect": ("megarun checkpoint inspect runs/my/checkpoints/step-00000500",),
    "checkpoint verify": ("megarun checkpoint verify runs/my",),
    "checkpoint export": (
        "megarun checkpoint export runs/my -o weights.safetensors",
        "megarun checkpoint export runs/my --format hf --config model/config.json --dtype bf16 -o exported",
    ),
    "checkpoint import": ("megarun checkpoint import plan.json model -o runs/start",),
    "launch slurm": ("megarun launch slurm plan.json --time 24:00:00 -- --data code.tokens --out runs/my --save-every 500 > job.sh",),
    "launch kubernetes": (
        "megarun launch kubernetes /data/plan.json --image IMAGE --volume data=/data -- --data /data/code.tokens --out /data/my > job.yaml",
    ),
}
"""Commands to copy, for your own plan, token file and run."""


def epilog(name: str) -> str:
    """The examples of a command as paragraphs of its help."""
    return examples_text(EXAMPLES[name])
