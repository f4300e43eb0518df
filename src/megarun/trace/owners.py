"""Who owns a storage: the rules that give every live storage one kind, one name and one budget column."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megakernels import scratch_bytes
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.products import LIBRARY_OPERATIONS
from megaplan.inventory.tensors import Group, Inventory, Owner
from megarun.engine.trainer import Trainer
from megarun.parallel.apply.weight_gradients import WeightGradients
from megarun.trace.kinds import COLUMNS, Kind
from megarun.trace.places import Places
from megarun.trace.replaced import replaced
from megarun.trace.tracker import LiveBytes, StorageRecord, plain_tensors

OWNER_COLUMNS = {
    Owner.REPLICATED: Column.REPLICATED_PARAMS,
    Owner.TENSOR_PARALLEL: Column.TENSOR_PARALLEL_PARAMS,
    Owner.EXPERT_PARALLEL: Column.EXPERT_PARALLEL_PARAMS,
}
ROUTED_OUTPUTS = {
    "megakernels.route.default": (1,),
    "megakernels.route_scored.default": (1, 4),
    "megakernels.dispatch_plan.default": (0, 1),
    "megakernels.arrival_plan.default": (0, 1),
    "megakernels.dispatch.default": (0,),
    "megakernels.experts.default": (0,),
    "megakernels.experts_gated.default": (0,),
    "megakernels.routed_experts.default": (0,),
    "megakernels.routed_experts_gated.default": (0,),
    "megakernels.combine.default": (0,),
    "megakernels.combine_backward.default": (0,),
    "megakernels.experts_backward.default": (0,),
    "megakernels.experts_gated_backward.default": (0,),
}
"""Outputs that are indices, counts, dispatched or combined rows, or gradients of such rows."""
SIDE_EMBEDDINGS = ("ngram", "structure")
"""Parts of a stage whose working storages are activations of features."""
RESIDUAL_OUTPUTS = {
    "aten.add.Tensor": (0,),
    "megakernels.gated_add.default": (0,),
    "megakernels.gated_add_backward.default": (0,),
}
"""Their outputs that are the residual stream, or its gradient."""
PARAMETER_GRADIENTS = {
    "aten.embedding_dense_backward.default": (0,),
    "megakernels.linear_cross_entropy_backward.default": (1,),
    "megakernels.linear_slice_gradients.default": (1,),
}
"""Outputs that can only be a parameter's gradient, also while autograd still waits for another part of it."""
MATRIX_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", *LIBRARY_OPERATIONS})
"""Operations that multiply with a library, those of ours that do so on a GPU included."""
COMPUTING = (Phase.FIRST_FORWARD_BACKWARD, Phase.FORWARD_BACKWARD)
"""Phases of forward and backward; what the others make is scratch, unless it turns out to be a parameter or state."""
COLLECTIVES = ("c10d.", "_c10d_functional.")
GROUP_STEPS = ("lazy_init", "unshard", "wait_for_unshard", "post_backward")
"""Methods of an FSDP2 group that make storages."""
REDUCTION = "post_backward"
SUM = "aten.add.Tensor"
COPY, CAST = "aten.copy_.default", "aten._to_copy.default"
"""In a reduction: what fills its output on a one-rank mesh, where nothing is sent, and what brings gradients to another dtype."""


class Owners:
    """Kinds, names and columns of storages; the tracker's observer.

    What only a later moment tells is labelled then: parameters and buffers once they have storage, FSDP2's buffers after each of its steps,
    optimizer state after an update. A stronger kind replaces a weaker one, never the reverse.
    """

    def __init__(self, inventory: Inventory, places: Places, workspace_bytes: int = 0, *, fake_only: bool = True) -> None:
        """Know nothing yet.

        Args:
            inventory: Owner rules and optimizer groups.
            places: What runs.
            workspace_bytes: What GEMM libraries take inside torch's allocator on the planned device, from the first matrix product on.
            fake_only: Whether real tensors are bookkeeping on the host, which a trace on fake tensors does not count.
        """
        self._tensors, self._places, self._workspace_bytes = dict(inventory.tensors()), places, workspace_bytes
        self._hooked: set[int] = set()
        self._names: dict[int, str] = {}
        self._parts: dict[StorageRecord, tuple[StorageRecord, ...]] = {}  # of a sum made in backward: what was added
        self._group_step: str | None = None  # the method of an FSDP2 group that runs
        self.live = LiveBytes(self, fake_only=fake_only)

    def born(self, record: StorageRecord, operands: tuple[Any, ...]) -> None:
        """Give a new storage the kind that its operation and the running phase imply."""
        record.place, record.forward = self._places.of_operation(self._operand_records(operands))
        if self.live.phase not in COMPUTING:
            record.kind = Kind.SCRATCH
        elif self._group_step is not None:
            record.kind = Kind.GRADIENT if self._group_step == REDUCTION and record.op == CAST else Kind.COLLECTIVE
        elif record.output in ROUTED_OUTPUTS.get(record.op, ()):
            record.kind = Kind.ROUTED
        elif record.output in PARAMETER_GRADIENTS.get(record.op, ()):
            record.kind = Kind.GRADIENT
        elif record.op == SUM and not record.forward:
            self._parts[record] = tuple(self._operand_records(operands))

    def added(self, total: StorageRecord, part: StorageRecord) -> None:
        """What is added to a gradient of a parameter is one itself."""
        self._parts[total] = (*self._parts.get(total, ()), part)
        if total.kind is Kind.GRADIENT:
            self._label_parts(total)

    def ran(self, op: str, operands: tuple[Any, ...]) -> None:
        """Count an operation's inside and the libraries' workspace, from the first product on; label the operands of communication."""
        if op in MATRIX_PRODUCTS and self._workspace_bytes:
            nbytes, self._workspace_bytes = self._workspace_bytes, 0
            made = StorageRecord(nbytes, op, 0, "", (nbytes,), None, Kind.LIBRARY, "GEMM workspace of the device data")
            self.live.declare(made)
        inside = scratch_bytes(op, operands)
        if inside:
            place = self._places.of_operation(self._operand_records(operands))[0]
            self.live.pass_by(StorageRecord(inside, op, 0, place, (inside,), None, Kind.SCRATCH, "inside the operation, as it states"))
        if self._group_step == REDUCTION and op == COPY:
            self.label(operands[0], Kind.GRADIENT)  # a reduction's output is one for its whole life, also where it is added to another
        if not op.startswith(COLLECTIVES) or self.live.phase not in COMPUTING:
            return
        if op.startswith("c10d.recv_"):
            self.label(operands, Kind.RECEIVE_BUFFER)
        elif op.startswith("c10d.alltoall_base_"):
            self.label(operands[:2], Kind.ROUTED)
        elif op.startswith("c10d._reduce_scatter_base_"):
            if self._group_step is not None:  # of parameters' gradients; TP's leaves activations or their gradients
                self.label(operands[0], Kind.GRADIENT)
            self.label(operands[1], Kind.COLLECTIVE)
        elif op.startswith("c10d._allgather_base_"):
            self.label(operands[0], Kind.COLLECTIVE)  # its input is FSDP2's, known since its birth, or an activation

    def label(self, value: Any, kind: Kind, name: str = "") -> None:
        """Name the storages inside a value, unless they are known as something stronger."""
        for record in self.live.records(value):
            record.kind = min(record.kind, kind)
            if kind is Kind.GRADIENT:
                self._label_parts(record)
            if name and not record.name and kind == record.kind:
                record.name = name

    def _label_parts(self, record: StorageRecord) -> None:
        """Label what a gradient is the sum of: autograd waits for every part of a parameter's before it hands that on."""
        for part in self._parts.pop(record, ()):
            part.kind = min(part.kind, Kind.GRADIENT)
            self._label_parts(part)

    def column(self, record: StorageRecord) -> Column:
        """The one budget column of a storage."""
        if record.kind in COLUMNS:
            side = record.kind is Kind.WORKING and record.place.partition(".")[0] in SIDE_EMBEDDINGS
            beside = side and record.output not in RESIDUAL_OUTPUTS.get(record.op, ())
            return Column.FEATURE_ACTIVATIONS if beside else COLUMNS[record.kind]
        tensor = self._tensors[record.name]
        if record.kind is Kind.PARAMETER:
            return OWNER_COLUMNS[tensor.owner]
        return Column.MATRIX_OPTIMIZER if tensor.group is Group.MATRIX else Column.OTHER_OPTIMIZER

    def label_parameters(self, stage: nn.Module) -> None:
        """Label the parameters, and remember their names, while they are all sharded."""
        for name, parameter in stage.named_parameters():
            self._names[id(parameter)] = name
            self.label(parameter.detach(), Kind.PARAMETER, name)

    def label_resident(self, trainer: Trainer) -> None:
        """Parameters, buffers and optimizer state, as they stand."""
        for stage in trainer.stages:
            for name, buffer in stage.named_buffers():
                self.label(buffer, Kind.INPUT, name)
        for parameter, state in trainer.optimizers.states():
            self.label(list(state.values()), Kind.OPTIMIZER_STATE, self._names[id(parameter)])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Label what FSDP2 and the second half of a split backward make, right when they have made it."""

        def watched(name: str, method: Any) -> Any:
            def call(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
                outer, self._group_step = self._group_step, name
                try:
                    return method(group, *args, **kwargs)
                finally:
                    self._group_step = outer
                    self._label_group(group)

            return call

        def labelled(store: WeightGradients, weight: Tensor, gradient: Tensor) -> None:
            self.label(gradient, Kind.GRADIENT)
            accumulate(store, weight, gradient)
            self.label(store.accumulated(weight), Kind.GRADIENT)  # of another dtype than `gradient`, it is a storage of its own

        accumulate = WeightGradients.accumulate
        steps = {name: watched(name, getattr(FSDPParamGroup, name)) for name in GROUP_STEPS}
        with replaced(FSDPParamGroup, **steps), replaced(WeightGradients, accumulate=labelled):
            yield

    def _label_group(self, group: FSDPParamGroup) -> None:
        for item in group.fsdp_params:
            name = self._name(item)
            self.label((item.sharded_param.detach(), item._sharded_param_data), Kind.PARAMETER, name)
            self.label(item.all_gather_outputs, Kind.GATHERED_PARAMETER, name)
            self.label((item.sharded_param.grad, item.unsharded_accumulated_grad), Kind.GRADIENT, name)
            whole = getattr(item, "_unsharded_param", None)
            if whole is not None:
                self.label(whole.grad, Kind.GRADIENT, name)
                if id(whole) not in self._hooked:
                    self._hooked.add(id(whole))
                    whole.register_hook(self._gradient_labeller(name))

    def _gradient_labeller(self, name: str) -> Any:
        def label(gradient: Tensor) -> None:
            self.label(gradient, Kind.GRADIENT, name)

        return label

    def _name(self, item: Any) -> str:
        name = self._names.get(id(item.sharded_param))
        if name is None:
            path = self._places.path(item._module_info.module)
            name = f"{path}.{item._module_info.param_name}" if path else item._module_info.param_name
        return name

    def _operand_records(self, operands: tuple[Any, ...]) -> Iterator[StorageRecord]:
        for operand in operands:
            for tensor in plain_tensors(operand):
                record = self.live.known(tensor)
                if record is not None:
                    yield record
