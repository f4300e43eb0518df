"""Options that several commands share."""

from typing import Annotated

import typer

from megaplan.cli import completion

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one value of the spec, like mesh.tp=8; repeatable.",
        autocompletion=completion.overrides,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
SpecOrPlan = Annotated[
    str,
    typer.Argument(
        metavar="SPEC|PLAN|MODEL",
        help="A spec (YAML or JSON), a plan, or a model: a Hugging Face config.json, its folder, or a name org/model; - for stdin.",
        autocompletion=completion.specs,
    ),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs of the job; without a mesh a quick search chooses the layout.")
]
DeviceName = Annotated[str | None, typer.Option("--device", metavar="NAME", help="The device, like h100 or b200 (megaplan devices).")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", metavar="N", min=1, help="Sequences of one optimizer step.")]
SeqLength = Annotated[int | None, typer.Option("--seq", metavar="N", min=1, help="Tokens of a sequence.")]
Processes = Annotated[int | None, typer.Option("--processes", metavar="N", min=1, help="Number of processes; one per processor.")]
Fetch = Annotated[bool, typer.Option("--fetch", help="Download the config of a model org/model that the local cache lacks.")]
SpecFile = Annotated[
    str,
    typer.Argument(
        metavar="SPEC", help="A spec (YAML or JSON) or a Hugging Face config.json; - for stdin.", autocompletion=completion.specs
    ),
]
CostsFile = Annotated[
    str | None,
    typer.Option("--costs", metavar="FILE", help="Measured layer times, in the format of `megaplan costs`; - for stdin."),
]
DeviceFile = Annotated[
    str | None,
    typer.Option(
        "--device-file", metavar="FILE", help="Shares of the peak rates that your device reaches, as `megaplan calibrate -o` writes them."
    ),
]
PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="A plan; - for stdin.", autocompletion=completion.plans)]
FailOn = Annotated[
    str | None,
    typer.Option(
        "--fail-on", metavar="CONDITIONS", help="Exit 3 if the plan meets a condition: oom, headroom<4GiB, step>1.5s; in a diff tokens<-5%."
    ),
]
