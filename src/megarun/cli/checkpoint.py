"""`megarun checkpoint`: list, inspect and verify a run's checkpoints, export their parameters, import those of a model.

Exit status: 0 done, 1 `verify` found damage, 2 an error. Only `export` and `import` load torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megaplan.diagnostics import diagnostic
from megaplan.dtypes import DType
from megaplan.errors import Location, MegaplanError
from megaplan.terminal import output
from megaplan.terminal.exit_status import ERROR
from megaplan.units import format_bytes
from megaplan.wording import plural
from megarun.checkpoint.index import INDEX, read_index
from megarun.checkpoint.manifest import MANIFEST, Manifest, damaged_files, list_checkpoints, read_manifest
from megarun.cli.examples import epilog
from megarun.data.identity import data_text
from megarun.errors import refusal
from megarun.job.run import read_job
from megarun.remote import AnyPath, StorageError, any_path

if TYPE_CHECKING:
    from megarun.huggingface.convert import Moved

LIST_FORMAT, INSPECT_FORMAT, VERIFY_FORMAT = "megarun.checkpoint-list/1", "megarun.checkpoint-inspect/1", "megarun.checkpoint-verify/1"
DAMAGED = 1
MOST_LEFT = 6
EXPORTED_DTYPES = {"fp32": DType.FP32, "bf16": DType.BF16}

app: typer.Typer = typer.Typer(name="checkpoint", help="List, inspect, verify, export and import checkpoints.", no_args_is_help=True)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="Folder or URL of a run or of one checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@app.command("list", epilog=epilog("checkpoint list"))
def list_command(folder: Folder, *, as_json: AsJson = False) -> int:
    """List the finished checkpoints of a run, newest first; those on other lines last."""
    return _answered(as_json, lambda: _list(folder, as_json))


@app.command("inspect", epilog=epilog("checkpoint inspect"))
def inspect_command(folder: Folder, *, as_json: AsJson = False) -> int:
    """Show the manifest and tensors of a checkpoint; for a run, of its newest one."""
    return _answered(as_json, lambda: _inspect(folder, as_json))


@app.command("verify", epilog=epilog("checkpoint verify"))
def verify_command(folder: Folder, *, as_json: AsJson = False) -> int:
    """Compare size and SHA-256 of every file of a checkpoint, or of all checkpoints of a run, with the manifest."""
    return _answered(as_json, lambda: _verify(folder, as_json))


@app.command("export", epilog=epilog("checkpoint export"))
def export_command(
    folder: Folder,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="A new .safetensors file; with --format hf a new folder.")],
    *,
    as_format: Annotated[str, typer.Option("--format", metavar="inventory|hf", help="Names of the tensors.")] = "inventory",
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="With --format hf: the model's config.json, if the plan does not say it."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="With --format hf, if not the run's: see sample.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="fp32|bf16", help="With --format hf: of the weights.")] = None,
) -> int:
    """Export the unsharded parameters of a checkpoint: one safetensors file, or a Hugging Face model's folder."""
    if as_format == "hf":
        return _answered(False, lambda: _export_hf(folder, config, out, dtype, tokenizer))
    of_hf = {"--config": config, "--tokenizer": tokenizer, "--dtype": dtype}
    if as_format != "inventory" or any(value is not None for value in of_hf.values()):
        given = f"--format {as_format}" if as_format != "inventory" else next(name for name, value in of_hf.items() if value is not None)
        raise typer.BadParameter(f"{given}: --format is inventory or hf, and {', '.join(of_hf)} belong to hf")
    return _answered(False, lambda: _export(folder, out))


@app.command("import", epilog=epilog("checkpoint import"))
def import_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan of the model, made from its config.json.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder: config.json and safetensors.")],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A new folder for the checkpoint.")],
) -> int:
    """Write the weights of a Hugging Face model as a checkpoint to start from, of any layout."""
    return _answered(False, lambda: _import(plan, model, out))


def _answered(as_json: bool, action: Callable[[], int]) -> int:
    try:
        return action()
    except MegaplanError as error:
        output.fail(error.diagnostics, as_json=as_json)
        return ERROR


def checkpoints_at(word: str) -> list[AnyPath]:
    """The folder itself if it is a checkpoint, else the finished checkpoints of the run, newest first.

    Raises:
        MegaplanError: MP649 if there is no checkpoint.
    """
    folder = any_path(word)
    found = [folder] if (folder / MANIFEST).is_file() else list_checkpoints(folder)
    if not found:
        raise refusal("MP649", f"{folder}: no {MANIFEST}, and no finished checkpoint in {folder / 'checkpoints'}", file=str(folder))
    return found


def _size(manifest: Manifest) -> int:
    return sum(record.bytes for record in manifest.files.values())


def _list(folder: str, as_json: bool) -> int:
    found = [(path, _read(path)) for path in checkpoints_at(folder)]
    if as_json:
        rows: list[dict[str, Any]] = [
            {"path": str(path), "damage": each}
            if isinstance(each, str)
            else {"path": str(path), "step": each.step, "bytes": _size(each), "world_size": each.world_size, "line": each.line}
            for path, each in found
        ]
        output.write_json({"format": LIST_FORMAT, "checkpoints": rows})
        return 0
    head = next((each.place for _, each in found if isinstance(each, Manifest)), None)
    for path, each in found:
        if isinstance(each, str):
            output.write(f"{path}  damaged: {each}\n")
            continue
        other_line = "" if head is None or each.place.leads_to(head) else "  on another line"
        output.write(f"{path}  step {each.step:,}  {format_bytes(_size(each))}  by {plural(each.world_size, 'rank')}{other_line}\n")
    return 0


def _read(path: AnyPath) -> Manifest | str:
    """The manifest, or why it cannot be read."""
    try:
        return read_manifest(path)
    except StorageError:
        raise
    except MegaplanError as error:
        return error.diagnostics[0].detail.removeprefix(f"{path}/")


def _inspect(folder: str, as_json: bool) -> int:
    path = checkpoints_at(folder)[0]
    manifest = read_manifest(path)
    tensors = read_index(path, manifest.files.get(INDEX))
    if as_json:
        shown = [
            {"name": name, "dtype": each.dtype, "shape": list(each.shape), "pieces": len(each.chunks)} for name, each in tensors.items()
        ]
        document = {"format": INSPECT_FORMAT, "path": str(path), "manifest": manifest.document(), "tensors": shown}
        output.write_json(document)
        return 0
    sequences, length = manifest.global_batch
    lines = [
        str(path),
        f"  step          {manifest.step:,} of {sequences:,} sequences of {length:,} tokens, seed {manifest.seed}",
        f"  saved by      {plural(manifest.world_size, 'rank')}, torch {manifest.torch}",
        f"  model         {manifest.model_digest}",
        f"  plan          {manifest.plan_digest}",
        f"  data          {'not recorded' if manifest.data is None else data_text(manifest.data)}",
        f"  line          {manifest.line[-1][0]}, from step {manifest.line[-1][1]:,}",
        f"  size          {format_bytes(_size(manifest))} in {len(manifest.files)} files",
        f"  tensors       {len(tensors):,}",
        *(
            f"    {name}  {each.dtype.removeprefix('torch.')} {list(each.shape)}, {plural(len(each.chunks), 'piece')}"
            for name, each in tensors.items()
        ),
    ]
    output.write("\n".join(lines) + "\n")
    return 0


def _verify(folder: str, as_json: bool) -> int:
    found: list[tuple[AnyPath, list[str]]] = []
    for path in checkpoints_at(folder):
        try:
            found.append((path, damaged_files(path, read_manifest(path))))
        except StorageError:
            raise
        except MegaplanError as error:
            found.append((path, [each.detail for each in error.diagnostics]))
    damaged = [(path, wrong) for path, wrong in found if wrong]
    if as_json:
        rows = [{"path": str(path), "whole": not wrong, "damage": wrong} for path, wrong in found]
        output.write_json({"format": VERIFY_FORMAT, "checkpoints": rows})
    else:
        for path, wrong in found:
            output.write(f"{path}  {'damaged' if wrong else 'OK'}\n")
        for path, wrong in damaged:
            output.report([diagnostic("MP644", "\n".join(wrong), Location(file=str(path)))])
    return DAMAGED if damaged else 0


def _require_whole(path: AnyPath) -> None:
    wrong = damaged_files(path, read_manifest(path))
    if wrong:
        raise refusal("MP644", "\n".join(wrong), file=str(path))


def _export(folder: str, out: Path) -> int:
    path = checkpoints_at(folder)[0]
    _require_whole(path)
    if out.exists():
        raise refusal("MP608", f"{out} exists", hints=(f"-o {out.stem}-2.safetensors",), file=str(out))
    from safetensors.torch import save_file  # noqa: PLC0415  (torch takes seconds to load)

    from megarun.checkpoint.full_tensors import full_tensors, tensor_names  # noqa: PLC0415
    from megarun.checkpoint.state import GENERATOR, OPTIMIZER  # noqa: PLC0415

    names = [name for name in tensor_names(path) if name.split(".")[0] not in (OPTIMIZER, GENERATOR)]
    tensors, manifest = dict(full_tensors(path, names)), read_manifest(path)
    metadata = {"format": "pt", "megarun.step": str(manifest.step), "megarun.model_digest": manifest.model_digest}
    try:
        save_file(tensors, out, metadata)
    except OSError as error:
        raise refusal("MP645", f"{out}: {error.strerror or error}", file=str(out)) from None
    output.write(f"{out}: {len(tensors):,} tensors, {format_bytes(sum(tensor.nbytes for tensor in tensors.values()))}\n")
    return 0


def _import(plan: Path, model: Path, out: Path) -> int:
    planned = read_job(plan, None)
    from megarun.huggingface.convert import import_weights  # noqa: PLC0415  (torch takes seconds to load)

    moved = import_weights(planned, model, out)
    _report(moved)
    output.write(f"megarun train {plan} --data FILE --out DIR --resume {moved.path} --weights-only\n")
    return 0


def _export_hf(folder: str, config: Path | None, out: Path, dtype: str | None, tokenizer: Path | None) -> int:
    path = checkpoints_at(folder)[0]
    _require_whole(path)
    from megarun.data.token_file import tokenizer_file  # noqa: PLC0415
    from megarun.dtypes import TORCH_DTYPES  # noqa: PLC0415  (torch takes seconds to load)
    from megarun.huggingface.convert import export_weights  # noqa: PLC0415
    from megarun.huggingface.describe import run_tokenizer  # noqa: PLC0415

    if dtype not in (None, *EXPORTED_DTYPES):
        raise refusal("MP664", f"--dtype = {dtype}, but weights are {' or '.join(EXPORTED_DTYPES)}", hints=("--dtype bf16",))
    words = run_tokenizer(folder) if tokenizer is None else tokenizer_file(tokenizer)
    _report(export_weights(path, config, out, None if dtype is None else TORCH_DTYPES[EXPORTED_DTYPES[dtype]], words))
    return 0


def _report(moved: Moved) -> None:
    output.report(moved.warnings)
    if moved.left:
        shown = ", ".join(moved.left[:MOST_LEFT]) + (f" and {len(moved.left) - MOST_LEFT} more" if len(moved.left) > MOST_LEFT else "")
        output.write(f"not read, since the model has no such tensor: {shown}\n")
    output.write(f"{moved.path}: {moved.num_tensors:,} tensors, {format_bytes(moved.num_bytes)}\n")
