"""One process of a world: runs the cases it is sent, and sends back what each computed."""

import functools
import gc
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from parity_changes import adapters_started, experts_chosen
from parity_course import RECIPE_UNITS, course, perturb
from parity_rows import CountingRows
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megakernels import unpacked
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import build_layout
from megaplan.plan.digests import model_digest
from megaplan.plan.inputs import inputs_record
from megaplan.spec.models import Mesh, Spec
from megarun.checkpoint.keeper import Keeper
from megarun.checkpoint.save import Saver
from megarun.data.batches import Batches
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.engine.trainer import Trainer
from megarun.job.job import Job
from megarun.job.run import Checkpoints, Run, SavedPlan
from megarun.job.support import refuse_unbuilt
from megarun.launch.failure import diagnostics_of
from megarun.launch.interrupt import Interrupt
from megarun.launch.process_group import Launch, process_group
from megarun.metrics.display import Display
from megarun.metrics.file import MetricsFile
from megarun.metrics.records import Decision
from megarun.optim.muon import Muon
from megarun.parallel.apply.recompute import recompute_stage
from megarun.parallel.groups.context import context_parallel
from megarun.parallel.groups.mesh import build_mesh
from megarun.parallel.groups.tensor import tensor_parallel
from megarun.training.evaluation import Evaluator
from megarun.training.loop import train_steps

CPU = torch.device("cpu")


def small_scale(trainer: Trainer) -> Trainer:
    """The trainer with a scale of fp16's losses at which no gradient overflows: a job would skip such a step."""
    trainer.scale_losses(2.0**8)
    return trainer


class LateLines(MetricsFile):
    """Reports a decision some time after the other ranks."""

    def write(self, metrics: Any) -> None:
        if isinstance(metrics, Decision) and self._writes:
            time.sleep(0.3)
        super().write(metrics)


def build_job(case: dict[str, Any]) -> Job:
    spec = Spec.model_validate(case["spec"])
    refuse_unbuilt(spec)
    inventory = build_inventory(spec)
    return Job(spec, inventory, build_layout(spec, inventory, [tuple(span) for span in case["spans"]]))


def train_case(case: dict[str, Any]) -> dict[str, Any]:
    """Values that this rank computed: initial and final parameters, gradients of the first batch, losses; FSDP2's shards gathered."""
    job = build_job(case)
    mesh = build_mesh(job.spec.mesh, CPU)
    with adapters_started():
        trainer = small_scale(Trainer(job, mesh))
    rows = CountingRows(job.spec.model.vocab_size, job.spec.batch.micro_batch_size, case.get("reversed_parts", 0))
    batches = Batches(rows, job.spec, mesh)
    parameters = [named for stage in trainer.stages for named in stage.named_parameters()]
    record: dict[str, Any] = {"initial": _by_name(job.spec, job.inventory, parameters, lambda p: p)}
    trainer.accumulate_gradients(batches.at(0))
    if any(parameter.grad is not None for _, parameter in parameters if not parameter.requires_grad):
        raise RuntimeError("a frozen parameter has a gradient")
    trained = [named for named in parameters if named[1].requires_grad]
    record["gradients"] = _by_name(job.spec, job.inventory, trained, lambda p: p.grad)
    for _, parameter in parameters:
        parameter.grad = None
    evaluator, control = Evaluator(job, trainer, rows, 1), torch.distributed.group.WORLD
    results = []
    for step in range(case["steps"]):
        results.append(trainer.step(step, batches.at(step)))
        if job.spec.mesh.world_size > 1:  # which leaves no trace, or parameters would not be the one process's
            evaluator.evaluate(step, Interrupt(), control)
    record["held_out"] = [evaluator.evaluate(case["steps"], Interrupt(), control).evaluation_loss]
    record["losses"] = [result.loss for result in results]
    record["auxiliary"] = [result.routed.balance_loss + result.routed.z_loss + result.further_loss for result in results]
    routings = [routing for result in results for routing in result.routed.layers]
    record["router_load"] = [routing.load for routing in routings]
    record["router_entropy"] = [routing.entropy for routing in routings]
    record["idle_experts"] = [routing.num_idle for routing in routings]
    record["norms"] = [result.gradient_norm for result in results]
    record["parameters"] = _by_name(job.spec, job.inventory, parameters, lambda p: p)
    record["resident_bytes"] = trainer.resident_bytes()
    return record


def course_case(case: dict[str, Any]) -> dict[str, Any]:
    """Gradients of three batches, and three steps of the optimizers, each by itself."""
    job = build_job(case)
    mesh = build_mesh(job.spec.mesh, CPU)
    rows = CountingRows(job.spec.model.vocab_size, job.spec.batch.micro_batch_size, case.get("reversed_parts", 0))
    with adapters_started():
        trainer = small_scale(Trainer(job, mesh))
    if "perturbed" in case:
        perturb(trainer, case["perturbed"], RECIPE_UNITS if job.spec.precision.recipe is not None else 1)
    return course(job, trainer, Batches(rows, job.spec, mesh), functools.partial(_by_name, job.spec, job.inventory))


def resume_case(case: dict[str, Any]) -> dict[str, Any]:
    """Start from step 0 or from the newest checkpoint of `from`, save immediately to `to`, train; the losses of these steps."""
    job = build_job(case)
    mesh = build_mesh(job.spec.mesh, CPU)
    trainer = small_scale(Trainer(job, mesh))
    text = json.dumps({"inputs": inputs_record(job.spec)})
    plan = SavedPlan(text, model_digest(job.spec, "".join(block.family for block in job.inventory.layers)), "sha256:")
    rows = CountingRows(job.spec.model.vocab_size)
    batches = Batches(rows, job.spec, mesh)
    start = 0
    if case["from"] is not None:
        keeper = Keeper(Run(job, rows, Path(case["from"]), 0, plan, Checkpoints(weights_only=case.get("weights_only", False))))
        keeper.find()
        start, _ = keeper.start(trainer)
    if case["before"] == 0 and start == 0:
        trainer.optimizers.make_states()  # there is nothing yet to save
    losses = []
    for step in range(start, start + case["before"]):
        losses.append(trainer.step(step, batches.at(step)).loss)
    start += case["before"]
    saver = Saver(Run(job, rows, Path(case["to"]), 0, plan, Checkpoints()), trainer, torch.distributed.new_group(backend="gloo"))
    saver.save(start)
    for step in range(start, start + case["after"]):  # while it is written
        losses.append(trainer.step(step, batches.at(step)).loss)
    saver.wait()
    return {"losses": losses}


def bad_steps_case(case: dict[str, Any]) -> dict[str, Any]:
    """Train and save into `to`, or resume there, with NaN on some batches; losses of this start."""
    job = build_job(case)
    mesh = build_mesh(job.spec.mesh, CPU)
    plan = SavedPlan("{}", model_digest(job.spec, "".join(block.family for block in job.inventory.layers)), "sha256:")
    rows, checkpoints = CountingRows(job.spec.model.vocab_size), Checkpoints(save_every=case["save_every"])
    run = Run(job, rows, Path(case["to"]), case["steps"], plan, checkpoints)
    keeper = Keeper(run)
    found = keeper.find()
    with poisoned(case["data"], case["gradient"]), LateLines(run.out, mesh.rank, resumed=found is not None) as metrics:
        trained = train_steps(run, mesh, keeper, Interrupt(), metrics, Display(run.num_steps, mesh.rank))
    return {"losses": {each.step: each.loss for each in trained.history}}


def batches_case(case: dict[str, Any]) -> dict[str, Any]:
    """Losses of steps that are made on the batches of these numbers."""
    job = build_job(case)
    mesh = build_mesh(job.spec.mesh, CPU)
    trainer, batches = small_scale(Trainer(job, mesh)), Batches(CountingRows(job.spec.model.vocab_size), job.spec, mesh)
    return {"losses": [trainer.step(step, batches.at(number)).loss for step, number in enumerate(case["batches"])]}


@contextmanager
def poisoned(data: list[int], gradient: list[int]) -> Iterator[None]:
    """NaN in what these batches compute."""
    at, accumulate, number = Batches.at, Trainer.accumulate_gradients, [0]

    def noting(self: Batches, step: int) -> Any:
        number[0] = step
        return at(self, step)

    def poison(self: Trainer, *batch: Any) -> torch.Tensor:
        bad = self.mesh.rank == 0 and number[0] in data
        hook = self.stages[0].register_forward_hook(lambda _, __, output: output * torch.nan) if bad else None
        partial = accumulate(self, *batch)
        if hook is not None:
            hook.remove()
        if self.mesh.rank == 1 and number[0] in gradient:
            found = next(self.stages[0].parameters()).grad
            (found.to_local() if isinstance(found, DTensor) else found).view(-1)[0] = torch.nan
        return partial

    Batches.at, Trainer.accumulate_gradients = noting, poison
    try:
        yield
    finally:
        Batches.at, Trainer.accumulate_gradients = at, accumulate


def compare_muon(_: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """Three steps of Muon on whole and on sharded copies of odd shapes and a stack, side by side."""
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    shapes = [((5, 7), 1), ((6, 4), 3), ((3, 4, 6), 3), ((15, 4), 3), ((1, 8), 1)]
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape, _ in shapes]
    whole = [torch.nn.Parameter(start.clone()) for start in starts]
    sharded = [torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])) for start in starts]
    options = {"lr": 0.1, "weight_decay": 0.1, "moments_dtype": torch.float32, "iteration_dtype": torch.float32, "num_steps": 5}
    optimizers = [Muon(zip(params, (count for _, count in shapes), strict=True), **options) for params in (whole, sharded)]
    for _ in range(3):
        for a, b in zip(whole, sharded, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = distribute_tensor(a.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    return {"whole": [p.detach() for p in whole], "sharded": [_gathered(p) for p in sharded]}


def compare_tensor_muon(_: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """Three steps of Muon on whole matrices and on this TP rank's parts: rows cut, columns cut, whole head groups, a part sharded too."""
    mesh = build_mesh(Mesh(tp=2, dp_shard=2), CPU)
    tp = tensor_parallel(mesh)
    cuts = [((6, 5), 1, 0), ((5, 6), 1, 1), ((6, 4), 1, 1), ((8, 3), 2, None)]  # shape, matrices, cut dim (None: groups of dim 0)
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape, _, _ in cuts]

    def part(value: torch.Tensor, cut: int | None) -> torch.Tensor:
        local = value.chunk(2, 0 if cut is None else cut)[tp.index].contiguous()
        return distribute_tensor(local, mesh.state_mesh, [Shard(0)])

    whole = [torch.nn.Parameter(start.clone()) for start in starts]
    parts = [torch.nn.Parameter(part(start, cut)) for start, (_, _, cut) in zip(starts, cuts, strict=True)]
    options = {"lr": 0.1, "weight_decay": 0.1, "moments_dtype": torch.float32, "iteration_dtype": torch.float32, "num_steps": 5}
    counts = [count for _, count, _ in cuts]
    own = [count // 2 if cut is None else count for _, count, cut in cuts]
    of_parts = {p: cut for p, (_, _, cut) in zip(parts, cuts, strict=True) if cut is not None}
    optimizers = [Muon(zip(whole, counts, strict=True), **options), Muon(zip(parts, own, strict=True), **options, cut=of_parts, tp=tp)]
    for _ in range(3):
        for a, b, (_, _, cut) in zip(whole, parts, cuts, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = part(a.grad, cut)
        for optimizer in optimizers:
            optimizer.step()
    expected = [p.detach().chunk(2, 0 if cut is None else cut)[tp.index] for p, (_, _, cut) in zip(whole, cuts, strict=True)]
    return {"whole": expected, "parts": [_gathered(p) for p in parts]}


def compare_packed(case: dict[str, Any]) -> dict[str, Any]:
    """Logits of own tokens and summed gradients of packed rows, of a stage over a CP group and of one that has whole rows."""
    spec = Spec.model_validate(case["spec"])
    inventory, cp = build_inventory(spec), context_parallel(build_mesh(spec.mesh, CPU))
    slot = build_layout(spec, inventory, [(0, spec.model.num_layers)]).slots[0]
    whole, own = build_stage(spec, inventory, slot), build_stage(spec, inventory, slot, cp=cp)
    for stage in (whole, own):
        recompute_stage(stage, spec, inventory)
        materialise(stage, CPU)
        initialise(stage, inventory, 0)
    length = spec.batch.seq_length
    tokens = torch.randint(0, spec.model.vocab_size, (len(case["documents"]), length), generator=torch.Generator().manual_seed(0))
    lengths = [torch.tensor(row) for row in case["documents"]]
    starts = torch.stack([torch.repeat_interleave(row.cumsum(0) - row, row) for row in lengths]).to(torch.int32)
    here = cp.positions(length)
    expected, found = whole(tokens, starts), own(tokens[:, here], cp.own_starts(starts))
    torch.autograd.backward(expected.square().sum())
    torch.autograd.backward(found.square().sum())
    for parameter in own.parameters():
        torch.distributed.all_reduce(parameter.grad)
    pairs = {name: (a.grad, b.grad) for (name, a), b in zip(own.named_parameters(), whole.parameters(), strict=True)}
    return {"logits": (found.detach(), expected[:, here].detach()), **pairs}


def compare_separate(case: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of a layout's packed rows; on rank 0 also those of one stage that takes the documents one by one."""
    job = build_job(case)
    mesh = build_mesh(job.spec.mesh, CPU)
    trainer, rows = small_scale(Trainer(job, mesh)), CountingRows(job.spec.model.vocab_size)
    partial = trainer.accumulate_gradients(Batches(rows, job.spec, mesh).at(0))
    parameters = [named for stage in trainer.stages for named in stage.named_parameters()]
    record = {"loss": float(partial), "gradients": _by_name(job.spec, job.inventory, parameters, lambda p: p.grad)}
    if mesh.rank == 0:
        record["separate"] = _separate_documents(Spec.model_validate({**case["spec"], "mesh": {}}), rows)
    return record


def _separate_documents(spec: Spec, rows: CountingRows) -> dict[str, Any]:
    """Loss and gradients of the whole model over the first batch's documents, each a sequence of its own length."""
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, spec.model.num_layers)]).slots[0])
    materialise(stage, CPU)
    initialise(stage, inventory, spec.training.seed)
    length, num_rows = spec.batch.seq_length, spec.batch.micro_batch_size * spec.schedule.microbatches_per_update
    batch = 0, spec.training.seed, num_rows, length
    table, total = torch.from_numpy(rows.starts(*batch)), 0.0
    num_targets = int((table[:, 1:] == table[:, :-1]).sum())
    for row, starts in zip(torch.from_numpy(rows.rows(*batch)), table, strict=True):
        for start in starts[:length].unique().tolist():
            tokens = row[(starts == start).nonzero().flatten()]  # the last one may be after the row, as a label
            stage.seq_length = min(len(tokens), length - start)
            stage.add_rotary(CPU)
            logits = stage(tokens[: stage.seq_length].unsqueeze(0))[0]
            loss = torch.nn.functional.cross_entropy(logits[: len(tokens) - 1], tokens[1:], reduction="sum") / num_targets
            torch.autograd.backward(loss)
            total += float(loss.detach())
    gradients = _by_name(spec, inventory, list(stage.named_parameters()), lambda p: p.grad)
    return {"loss": total, "gradients": {name: gradient for name, (gradient,) in gradients.items()}}


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _by_name(
    spec: Spec, inventory: Inventory, parameters: list[tuple[str, torch.nn.Parameter]], value: Any
) -> dict[str, list[torch.Tensor]]:
    """Each tensor gathered over its shards, a bank as a stack (or slices), packed rows as a matrix; a name in two chunks has two."""
    found: dict[str, list[torch.Tensor]] = {}
    tensors = dict(inventory.tensors())
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for name, parameter in parameters:
        tensor = value(parameter)
        if tensor is None:
            raise RuntimeError(f"{name} has no gradient")
        whole = _gathered(tensor)
        if spec.packing is not None and whole.dtype is torch.uint8:
            parts = spec.mesh.tp if tensors[name].tp_dim == 1 else 1
            whole = unpacked(whole, shapes[name][1] // parts, spec.packing, torch.float32)
        if whole.dim() < len(shapes[name]):
            whole = whole.reshape(-1, *tensors[name].local_shape(1, 1, spec.mesh.etp)[1:])
        found.setdefault(name, []).append(whole)
    return found


RUNS = {
    "train": train_case,
    "course": course_case,
    "resume": resume_case,
    "bad steps": bad_steps_case,
    "batches": batches_case,
    "muon": compare_muon,
    "tensor muon": compare_tensor_muon,
    "packed": compare_packed,
    "separate": compare_separate,
}


def serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    """Run cases until the pipe closes; the first error ends the process, for the others of its world wait for it."""
    torch.set_num_threads(1)  # as torchrun's workers have: small tensors, and sums in one order
    store = TCPStore("127.0.0.1", port, world_size, is_master=False)
    number = 0
    caches = [found for found in gc.get_objects() if isinstance(found, functools._lru_cache_wrapper)]
    gc.freeze()  # what is imported stays: the collection after each cell is short
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        number += 1
        launch = Launch(rank, world_size, rank, PrefixStore(f"cell{number}", store))
        try:
            with process_group(launch, CPU), experts_chosen(case.get("experts")):
                record = RUNS[case.get("run", "train")](case)
        except Exception as error:
            problem = "\n".join(f"{found.code} {found.detail}" for found in diagnostics_of(error))
            pipe.send_bytes(_packed({"error": problem}))
            return
        _forget_groups(caches)
        pipe.send_bytes(_packed(record))


def _forget_groups(caches: list[Any]) -> None:
    """Let go of a cell's process groups: one that is still held keeps three gloo threads, one of which wakes 100 times a second.

    DTensor's caches hold meshes, and those their groups.
    """
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for cache in caches:
        if cache.__module__.startswith("torch.distributed"):
            cache.cache_clear()
    gc.collect()


def _packed(record: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(record, buffer)
    return buffer.getvalue()
