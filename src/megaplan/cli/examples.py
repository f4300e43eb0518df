"""Groups of commands, and examples, for help texts."""

from megaplan.terminal.usage import examples_text

GROUPS = {
    "Plan": ("estimate", "search", "split", "run", "rl", "costs", "schedule", "show", "report", "project"),
    "Review": ("diff", "check", "sign"),
    "Move": ("export", "import", "new", "schema"),
    "Look up": ("explain", "devices", "calibrate"),
}
"""Commands by purpose, in the order of the help."""
EXAMPLES = {
    "estimate": (
        "megaplan estimate spec.yaml",
        "megaplan estimate spec.yaml --set mesh.tp=2 --compare device.name=b200",
        "megaplan estimate plan.json --rank 3 --explain",
    ),
    "search": (
        "megaplan search spec.yaml --devices 64",
        "megaplan search config.json --devices 64 --device h100 --global-batch 512 --seq 4096",
        "megaplan search spec.yaml --devices 32,64,128 --device h100,b200 --price h100=2.5,b200=4",
        "megaplan search spec.yaml --devices 64 --fix mesh.tp=8 --exhaust -o best",
        "megaplan search spec.yaml --devices 64 --host megatron -o launches",
    ),
    "rl": ("megaplan rl spec.yaml", "megaplan rl spec.yaml --explain", "megaplan rl spec.yaml --search --gpus 64"),
    "split": ("megaplan split spec.yaml -o plan.json", "megaplan split spec.yaml --set mesh.pp=4 -o plan.json"),
    "diff": (
        "megaplan diff old.json new.json",
        "megaplan diff main...HEAD --format markdown",
        "megaplan diff old.json new.json --fail-on 'oom,tokens<-5%'",
    ),
    "check": ("megaplan check plans/*.json", "megaplan check plan.json --spec spec.yaml --strict"),
    "sign": ("megaplan sign plan.json --key key.pem", "megaplan check plan.json --signer public.pem"),
    "explain": ("megaplan explain MP203", "megaplan explain activations", "megaplan explain MFU", "megaplan explain list"),
    "export": ("megaplan export plan.json --to megatron -o launch.sh", "megaplan export plan.json --to chrome-trace -o step.json"),
    "report": ("megaplan report plan.json -o report.html", "megaplan report old.json new.json -o comparison.html"),
    "schedule": ("megaplan schedule --kind 1f1b --pp 4 --microbatches 16",),
    "run": ("megaplan run spec.yaml --tokens 2T --mtbf 30000h --price 2.5", "megaplan run plan.json --tokens 300B --figures"),
    "costs": ("megaplan costs spec.yaml -o costs.json",),
    "show": ("megaplan show plan.json", "megaplan show plan.json --svg step.svg"),
    "calibrate": ("megaplan calibrate spec.yaml --step-seconds 1.5 -o device.json",),
    "project": ("megaplan project runs/my --to 64..4096",),
    "devices": ("megaplan devices", "megaplan devices h200"),
    "import hf": ("megaplan import hf config.json -o spec.yaml",),
    "import megatron": (
        "megaplan import megatron launch.sh --gpus 64 -o job.yaml",
        "megaplan import megatron --record --gpus 64 -o job.yaml -- bash launch.sh",
    ),
    "import torchtitan": ("megaplan import torchtitan job.toml --gpus 8 -o job.yaml",),
    "import maxtext": ("megaplan import maxtext base.yml model_name=llama3.1-8b compile_topology=v6e-16 -o job.yaml",),
    "new": ("megaplan new tiny-hybrid -o spec.yaml",),
    "schema": ("megaplan schema spec > spec.schema.json",),
}
"""Commands to copy, for your own spec or plan."""


def group_of(name: str) -> str | None:
    """The group of a command."""
    return next((group for group, names in GROUPS.items() if name in names), None)


def epilog_of(name: str) -> str | None:
    """The examples of a command as paragraphs of its help."""
    return examples_text(EXAMPLES[name]) if name in EXAMPLES else None
