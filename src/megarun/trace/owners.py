"""Ownership of storages: the rules that assign every live storage one kind, one name and one budget column."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from megakernels import scratch_bytes
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.products import LIBRARY_OPERATIONS
from megaplan.hosts.megarun.storage import OWNER_COLUMNS
from megaplan.inventory.tensors import Group, Inventory, Outside
from megarun import host_memory
from megarun.engine.trainer import Trainer
from megarun.parallel.apply.weight_gradients import WeightGradients
from megarun.parallel.apply.whole import WholeGroup, whole_state
from megarun.trace.kinds import COLUMNS, Kind
from megarun.trace.places import Places, in_side_embedding, is_stream
from megarun.trace.replaced import replaced
from megarun.trace.tracker import LiveBytes, StorageRecord, plain_tensors

ROUTED_OUTPUTS = {
    "megakernels.route.default": (1,),
    "megakernels.route_sigmoid.default": (1,),
    "megakernels.route_scored.default": (1, 4),
    "megakernels.route_scored_sigmoid.default": (1, 4),
    "megakernels.dispatch_plan.default": (0, 1),
    "megakernels.capacity_plan.default": (0, 1),
    "megakernels.arrival_plan.default": (0, 1),
    "aten.new_full.default": (0,),  # counts that a capacity states
    "megakernels.dispatch.default": (0,),
    "megakernels.experts.default": (0,),
    "megakernels.experts_gated.default": (0,),
    "megakernels.combine_backward.default": (0,),
    "megakernels.experts_backward.default": (0,),
    "megakernels.experts_gated_backward.default": (0,),
}
"""Operations whose outputs are indices, counts, dispatched rows, or gradients of such rows. Combined rows are the block's result."""
OF_ROWS = "megakernels.fp8_experts.default"
"""The operation whose result is combined rows if it reads tokens, and rows to return if it reads received rows."""
_BANKS = ("experts", "experts_gated", "routed_experts", "routed_experts_gated", "fp8_experts")
ROUTED_OPERANDS = {
    "megakernels.dispatch.default": slice(1, 2),
    "megakernels.dispatch_backward.default": slice(1),
    **dict.fromkeys((f"megakernels.{name}.default" for name in _BANKS), slice(2, 4)),
}
"""Operands that are indices, counts or gradients of dispatched rows, whatever made them."""
PARAMETER_GRADIENTS = {
    "aten.embedding_dense_backward.default": (0,),
    "megakernels.linear_cross_entropy_backward.default": (1,),
    "megakernels.linear_slice_gradients.default": (1,),
}
"""Operations whose outputs can only be a parameter's gradient, even before autograd has accumulated all parts."""
MATRIX_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", *LIBRARY_OPERATIONS})
"""Operations that use a GEMM library, including custom ops that do so on a GPU."""
COMPUTING = (Phase.FIRST_FORWARD_BACKWARD, Phase.FORWARD_BACKWARD)
"""Phases of forward and backward; storages of other phases are scratch unless they become a parameter or state."""
COLLECTIVES = ("c10d.", "_c10d_functional.")
GROUP_STEPS = ("lazy_init", "unshard", "wait_for_unshard", "_to_sharded_post_forward", "post_backward")
"""Methods of an FSDP2 group that allocate storages."""
REDUCTION = "post_backward"
COLLECTION = "collect"
"""The method of a group without FSDP2 that allocates gradients; its `fill` allocates copies."""
SUM = "aten.add.Tensor"
SLICES_SUM = "aten.sum.IntList_out"
"""The sum of rows over slices of experts."""
COPY, CAST = "aten.copy_.default", "aten._to_copy.default"
"""Operations in a reduction that fill its output on a one-rank mesh, or cast gradients."""


class Owners:
    """Kinds, names and columns of storages; the tracker's observer.

    Some kinds are only known later: parameters and buffers are labelled after materialisation, FSDP2's buffers after each of its methods,
    optimizer state after an update. A kind of higher priority replaces a lower one, never the reverse.
    """

    def __init__(self, inventory: Inventory, places: Places, workspace_bytes: int = 0, *, fake_only: bool = True) -> None:
        """Start without records.

        Args:
            inventory: Owner rules and optimizer groups.
            places: Tracker of the running modules.
            workspace_bytes: Bytes of the GEMM libraries' workspace in torch's allocator on the planned device, from the first matrix
                product.
            fake_only: True to ignore real tensors, which are host bookkeeping in a trace on fake tensors.
        """
        self._tensors, self._places, self._workspace_bytes = dict(inventory.tensors()), places, workspace_bytes
        self._workspace_of_stream = workspace_bytes
        self._hooked: set[int] = set()
        self._names: dict[int, str] = {}
        self._parts: dict[StorageRecord, tuple[StorageRecord, ...]] = {}  # addends of a sum computed in backward
        self._group_step: str | None = None  # the running method of an FSDP2 group
        self._partial_sums: set[tuple[object, ...]] = set()  # products of a forward that are reduced over a group
        self.live = LiveBytes(self, fake_only=fake_only)

    def on_alloc(self, record: StorageRecord, operands: tuple[Any, ...]) -> None:
        """Give a new storage the kind that its operation and the running phase imply."""
        record.place, record.forward = self._places.of_operation(self._operand_records(operands))
        if self.live.phase not in COMPUTING:
            record.kind = Kind.SCRATCH
        elif self._group_step is not None:
            gradient = (self._group_step == REDUCTION and record.op == CAST) or self._group_step == COLLECTION
            record.kind = Kind.GRADIENT if gradient else Kind.COLLECTIVE
        elif record.output in ROUTED_OUTPUTS.get(record.op, ()) or (record.op == OF_ROWS and self._goes_back(record, operands)):
            record.kind = Kind.ROUTED
        elif record.output in PARAMETER_GRADIENTS.get(record.op, ()):
            record.kind = Kind.GRADIENT
        elif record.op == SUM and not record.forward:
            self._parts[record] = tuple(self._operand_records(operands))
        elif self._places.in_module and _product(record) in self._partial_sums:
            record.kind = Kind.COLLECTIVE  # its recomputation may stop before the reduction

    def _goes_back(self, record: StorageRecord, operands: tuple[Any, ...]) -> bool:
        """True for the result of an operation whose first operand was received from other ranks."""
        return not record.output and next(self._operand_records(operands)).kind in (Kind.ROUTED, Kind.COLLECTIVE)

    def on_accumulate(self, total: StorageRecord, part: StorageRecord) -> None:
        """Label the addend of a parameter gradient as a parameter gradient."""
        self._parts[total] = (*self._parts.get(total, ()), part)
        if total.kind is Kind.GRADIENT:
            self._label_parts(total)

    def on_run(self, op: str, operands: tuple[Any, ...]) -> None:
        """Count an operation's scratch and, from the first product, the GEMM workspace; label the operands of communication."""
        if op in MATRIX_PRODUCTS and self._workspace_bytes:
            nbytes, self._workspace_bytes = self._workspace_bytes, 0
            made = StorageRecord(nbytes, op, 0, "", (nbytes,), None, Kind.LIBRARY, "GEMM workspace of the device data")
            self.live.declare(made)
        inside = scratch_bytes(op, operands)
        if inside:
            place = self._places.of_operation(self._operand_records(operands))[0]
            self.live.record_transient(StorageRecord(inside, op, 0, place, (inside,), None, Kind.SCRATCH, "stated by the operation"))
        if self._group_step == REDUCTION and op == COPY:
            self.label(operands[0], Kind.GRADIENT)  # the output of a reduction is always a gradient, even if it is added to another
        if self.live.phase not in COMPUTING:
            return
        if op == SLICES_SUM:
            self.label(operands, Kind.ROUTED)
        self.label(operands[ROUTED_OPERANDS.get(op, slice(0))], Kind.ROUTED)
        if op.startswith(COLLECTIVES):
            self._label_communication(op, operands)

    def _label_communication(self, op: str, operands: tuple[Any, ...]) -> None:
        if op.startswith("c10d.recv_"):
            self.label(operands, Kind.RECEIVE_BUFFER)
        elif op.startswith("c10d.alltoall_base_"):
            self.label(operands[:2], Kind.ROUTED)
        elif op.startswith("c10d.broadcast_"):
            self.label(operands[0], Kind.ROUTED)  # rows for the slices of experts
        elif op.startswith("c10d._reduce_scatter_base_"):
            if self._group_step is not None:  # a reduction of parameter gradients; TP's outputs are activations or their gradients
                self.label(operands[0], Kind.GRADIENT)
            for record in self.live.records(operands[1]):  # also partial sums of experts' rows
                record.kind = Kind.COLLECTIVE if record.kind is Kind.ROUTED else min(record.kind, Kind.COLLECTIVE)
                if record.forward:
                    self._partial_sums.add(_product(record))
        elif op.startswith("c10d._allgather_base_"):
            self.label(operands[0], Kind.COLLECTIVE)  # the input belongs to FSDP2, labelled at allocation, or is an activation

    def enter_stream(self) -> None:
        """Begin to run in a stream that is new to the GEMM libraries: the next product takes a workspace for it."""
        self._workspace_bytes = self._workspace_of_stream

    def label(self, value: Any, kind: Kind, name: str = "") -> None:
        """Label the storages in a value, unless they have a kind of higher priority."""
        for record in self.live.records(value):
            record.kind = min(record.kind, kind)
            if kind is Kind.GRADIENT:
                self._label_parts(record)
            if name and not record.name and kind == record.kind:
                record.name = name

    def _label_parts(self, record: StorageRecord) -> None:
        """Label the addends of a gradient: autograd accumulates all parts of a parameter's gradient before it passes the sum on."""
        for part in self._parts.pop(record, ()):
            part.kind = min(part.kind, Kind.GRADIENT)
            self._label_parts(part)

    def column(self, record: StorageRecord) -> Column:
        """The one budget column of a storage."""
        if record.kind in COLUMNS:
            is_feature = (in_side_embedding(record) and not is_stream(record)) or record.place == Outside.RELATION_BIAS
            return Column.FEATURE_ACTIVATIONS if is_feature and record.kind is Kind.WORKING else COLUMNS[record.kind]
        tensor = self._tensors[record.name]
        if record.kind is Kind.PARAMETER:
            return OWNER_COLUMNS[tensor.owner]
        return Column.MATRIX_OPTIMIZER if tensor.group is Group.MATRIX else Column.OTHER_OPTIMIZER

    def label_parameters(self, stage: nn.Module) -> None:
        """Label the parameters and record their names while all are sharded."""
        for name, parameter in stage.named_parameters():
            self._names[id(parameter)] = name
            self.label(parameter.detach(), Kind.PARAMETER, name)
            if parameter.requires_grad and whole_state(stage) is not None:
                parameter.register_hook(self._gradient_labeller(name))  # type: ignore[no-untyped-call]

    def label_resident(self, trainer: Trainer) -> None:
        """Label parameters, buffers and optimizer state."""
        for stage in trainer.stages:
            for name, buffer in stage.named_buffers():
                self.label(buffer, Kind.INPUT, name)
        for parameter, state in trainer.optimizers.states():
            self.label(trainer.optimizers.on_device(parameter, state), Kind.OPTIMIZER_STATE, self._names[id(parameter)])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which storages of groups and of the second half of a split backward are labelled after allocation."""

        def watched(name: str, method: Any, label: Callable[[Any], None]) -> Any:
            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                outer, self._group_step = self._group_step, name
                try:
                    return method(group, *args, **kwargs)
                finally:
                    self._group_step = outer
                    label(group)

            return call

        def labelled(store: WeightGradients, weight: Tensor, gradient: Tensor) -> None:
            self.label(gradient, Kind.GRADIENT)
            accumulate(store, weight, gradient)
            self.label(store.accumulated(weight), Kind.GRADIENT)  # a separate storage if its dtype differs from that of `gradient`

        def uncounted(num_bytes: int, device: torch.device) -> Tensor:
            with self.live.paused():  # host memory
                return take_memory(num_bytes, device)

        def reset(parameter: Any) -> None:
            if not _is_padded(parameter):
                reset_always(parameter)  # type: ignore[no-untyped-call]

        accumulate, take_memory, reset_always = WeightGradients.accumulate, host_memory.take_memory, FSDPParam.reset_sharded_param
        steps = {name: watched(name, getattr(FSDPParamGroup, name), self._label_group) for name in GROUP_STEPS}
        whole = {name: watched(name, getattr(WholeGroup, name), self._label_whole) for name in ("fill", COLLECTION, "start_sum")}
        with (
            replaced(FSDPParamGroup, **steps),
            replaced(FSDPParam, reset_sharded_param=reset),
            replaced(WholeGroup, **whole),
            replaced(WeightGradients, accumulate=labelled),
            replaced(host_memory, take_memory=uncounted),
        ):
            yield

    def _label_whole(self, group: WholeGroup) -> None:
        for member in group.members:
            name = self._names[id(member.stored)]
            self.label((member.stored.grad, member.used.grad), Kind.GRADIENT, name)
            if member.copied:
                self.label(member.used.detach(), Kind.GATHERED_PARAMETER, name)
            if member.used.requires_grad and id(member.used) not in self._hooked:
                self._hooked.add(id(member.used))
                member.used.register_hook(self._gradient_labeller(name))  # type: ignore[no-untyped-call]

    def _label_group(self, group: FSDPParamGroup) -> None:
        for item in group.fsdp_params:
            name = self._name(item)
            self.label((item.sharded_param.detach(), item._sharded_param_data), Kind.PARAMETER, name)
            self.label(item.all_gather_outputs, Kind.GATHERED_PARAMETER, name)
            self.label(getattr(item, "_sharded_post_forward_param_data", None), Kind.GATHERED_PARAMETER, name)
            self.label((item.sharded_param.grad, item.unsharded_accumulated_grad), Kind.GRADIENT, name)
            whole = getattr(item, "_unsharded_param", None)
            if whole is not None:
                self.label(whole.grad, Kind.GRADIENT, name)
                if whole.requires_grad and id(whole) not in self._hooked:
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


def _is_padded(parameter: Any) -> bool:
    """True if a shard has been padded in place: FSDP2 compares addresses, which fake tensors do not have, and would pad it again."""
    local, module = parameter.sharded_param._local_tensor, parameter._module_info
    same = parameter._sharded_param_data.untyped_storage()._cdata == local.untyped_storage()._cdata
    return same and not local.is_meta and getattr(module.module, module.param_name) is parameter.sharded_param


def _product(record: StorageRecord) -> tuple[object, ...]:
    return record.op, record.place, record.shape, record.dtype
