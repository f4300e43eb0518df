"""`precision.recipe.param_gather`: FSDP2 gathers packed weights (`megaplan.spec.local`), made of each rank's shard.

What FSDP2 calls the unsharded parameter has the weight's shape and no elements: products read the packed rows that it carries.
torch's extension of the all-gather (`fsdp_pre_all_gather`) would not do: its inputs must have a padded shard's shape where shards are
uneven, and it knows no parts that are kept between forward and backward.

With scaling tensor and nvfp4, scales depend on the largest magnitude of the whole weight; with fp8_blockwise on the magnitudes of its
blocks, which shards may divide; with rows, for the gradient of the input, on its columns'. A stage finds the scales of all its weights at
once, in the first gather after they changed, by one all-reduce of maxima; torchao also does this once per step. Under delayed scaling the
factors are known before the gather, which exchanges no maxima: a rank records its shard's.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py; torchao 0.18, `precompute_float8_dynamic_scale_for_fsdp`.
"""

import weakref
from collections.abc import Container, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from megakernels.ops.fp8_linear.blocks import WEIGHT
from megakernels.ops.fp8_linear.delayed import delayed_of
from megakernels.ops.fp8_linear.packing.facts import OWN_LARGEST, TWO_FORMS, num_largest, packed_columns, squares
from megakernels.ops.fp8_linear.weights import pack_weight, square_maxima
from megaplan.spec.local import packed_gather
from megaplan.spec.models import Spec
from megaplan.spec.pattern import parse_pattern
from megarun.dtypes import TORCH_DTYPES
from megarun.model.moe import ExpertBank, banks_of
from megarun.model.stage import Stage
from megarun.parallel.apply.gradients import groups_of
from megarun.parallel.groups.delayed import OwnNumbers
from megarun.parallel.groups.scaled import PackedMatrix, attach


def pack_gathers(stage: Stage, spec: Spec) -> None:
    """Make a wrapped stage's groups gather the weights packed that the plan says."""
    packs = packed_gather(spec)
    if packs is None:
        return
    letters = parse_pattern(spec.model.pattern, spec.model.num_layers).layers
    dense, of_banks = (_Maxima(packs.scaling, stage) for _ in range(2))  # by mesh
    for index, block in stage.layers.items():
        family = letters[int(index)]
        if not packs.covers(f"layers.{index}", family):
            continue
        names, banks = {module: name for name, module in block.named_modules()}, banks_of(block)
        for wrapped in (block, *banks):
            maxima, count = (of_banks, wrapped.num_experts) if isinstance(wrapped, ExpertBank) else (dense, 1)
            for group in groups_of(wrapped):  # type: ignore[arg-type]  # wrapped before
                for parameter in _within(group, names):
                    info, (rows, *columns) = parameter._module_info, parameter._orig_size
                    shape = (rows, *columns) if wrapped is block else (count, rows // count, *columns)
                    if packs.shard_bytes(family, f"{names[info.module]}.{info.param_name}", shape) is not None:
                        both = family in packs.both
                        _PackedParameter.of(parameter, group, maxima, TORCH_DTYPES[spec.precision.of(family)], count, both=both)
                        if stage.delayed is not None:
                            parameter.numbers = stage.delayed.of[f"layers.{index}.{names[info.module]}.{info.param_name}"]
    of_banks.start = dense.count
    stage.num_packed = dense.count + of_banks.count


def _within(group: Any, modules: Container[nn.Module]) -> list[Any]:
    """The parameters of a group that are some modules' own: a unit of several layers has others."""
    return [parameter for parameter in group.fsdp_params if parameter._module_info.module in modules]


class _Maxima:
    """Largest magnitudes of a stage's packed weights, which are in a buffer of the stage."""

    def __init__(self, scaling: str, stage: Stage) -> None:
        self.scaling, self._stage = scaling, weakref.ref(stage)
        self.parameters: list[_PackedParameter] = []
        self.start = 0  # offset of these numbers in the stage's buffer

    @property
    def count(self) -> int:
        """Numbers of all parameters."""
        return sum(parameter.num_largest for parameter in self.parameters)

    def refresh(self) -> None:
        """Find them, if a weight changed since they were found. Collective over the ranks that share the weights."""
        for parameter in self.parameters:
            parameter.version = parameter._sharded_param_data._version
        largest = torch.cat([self._largest(parameter) for parameter in self.parameters]).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.parameters[0].group.mesh_info.shard_process_group)
        stage = self._stage()
        assert stage is not None
        place = stage.packed_maxima[self.start : self.start + self.count]
        place.copy_(largest.to(self.parameters[0].used))  # rounding does not change the order of numbers
        for parameter, found in zip(self.parameters, torch.split(place, [each.num_largest for each in self.parameters]), strict=True):
            parameter.matrix.largest = found

    def _largest(self, parameter: "_PackedParameter") -> Tensor:
        shard = parameter._sharded_param_data.view(parameter.padded_sharded_param_size)
        found = shard.new_zeros((parameter.groups, parameter.num_largest // parameter.groups))
        for part, index, place in parameter.pieces():
            if self.scaling == "fp8_blockwise":
                square_maxima(shard[part], place, found[index].view(squares(*parameter.matrix_size)))
                continue
            number = torch.linalg.vector_norm(shard[part], float("inf"), dim=0 if self.scaling == "rows" else None)
            found[index].copy_(torch.maximum(found[index], number))
        return found.view(-1)


class _PackedParameter(FSDPParam):
    """A parameter of FSDP2 that is packed for its gather."""

    group: Any
    maxima: _Maxima
    matrix: PackedMatrix
    used: torch.dtype
    width: int
    version: int
    groups: int
    num_largest: int
    numbers: OwnNumbers | None = None  # of delayed scaling

    @staticmethod
    def of(parameter: Any, group: Any, maxima: _Maxima, used: torch.dtype, count: int, *, both: bool) -> None:
        """Make a parameter of this group packed: it has `count` matrices and is rounded to the dtype `used` before packing."""
        parameter.__class__ = _PackedParameter
        has_other = maxima.scaling in TWO_FORMS
        parameter.group, parameter.maxima, parameter.used, parameter.version = group, maxima, used, -1
        parameter.matrix = PackedMatrix(None, both=both, has_other=has_other)
        parameter.width = packed_columns(parameter._orig_size[1], maxima.scaling) * (1 + both)
        parameter.groups = count if maxima.scaling in OWN_LARGEST else 1
        rows, columns = parameter.matrix_size
        parameter.num_largest = parameter.groups * num_largest(rows, columns, maxima.scaling)
        if parameter.num_largest:
            maxima.parameters.append(parameter)
        if parameter.post_forward_mesh_info is not None:
            parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter.gathered_size, device="meta"))

    @property
    def matrix_size(self) -> tuple[int, int]:
        """Rows and columns of one of its matrices."""
        return self._orig_size[0] // self.groups, self._orig_size[1]

    @property
    def gathered_size(self) -> torch.Size:
        """Shape of the rows of all shards."""
        return torch.Size((self.padded_sharded_param_size[0] * self.group.mesh_info.shard_mesh_size, self.width))

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        """Settings of dtypes; the packed shard is not cast."""
        super().init_dtype_attrs(mp_policy)
        self.param_dtype = None

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The packed shard, or the part of all packed rows that was kept after forward."""
        if self.sharded_state == ShardedState.SHARDED_POST_FORWARD:
            assert self._sharded_post_forward_param_data is not None
            return [self._sharded_post_forward_param_data]
        shard, matrix = self._sharded_param_data.view(self.padded_sharded_param_size), self.matrix
        if self.maxima.parameters and self.version != self._sharded_param_data._version:
            self.maxima.refresh()
        matrix.turned = matrix.has_other and self.group._training_state is TrainingState.PRE_BACKWARD
        packed = torch.empty((shard.shape[0], self.width), dtype=torch.uint8, device=shard.device)
        parts = (packed[:, : self.width // 2], packed[:, self.width // 2 :]) if matrix.both else (packed,)
        delayed = None if self.numbers is None else delayed_of(self.numbers(), WEIGHT)
        largest = [matrix.largest] if matrix.largest is None or self.groups == 1 else matrix.largest.view(self.groups, -1)
        for index, part in enumerate(parts):
            turned = bool(index) if matrix.both else matrix.turned
            for piece, own, place in self.pieces():
                given = shard[piece], self.maxima.scaling, part[piece], largest[own], self.used
                pack_weight(*given, turned=turned, place=place, delayed=delayed)
        return [packed.view(-1)]

    def pieces(self) -> Iterator[tuple[slice, int, int]]:
        """Rows of the shard that belong to one matrix, its index and its first row's position; padding belongs to the last."""
        rows, each = self.padded_sharded_param_size[0], self._orig_size[0] // self.groups
        first, place = rows * self.group.mesh_info.shard_mesh_rank, 0
        while place < rows:
            index = min((first + place) // each, self.groups - 1)
            stop = rows if index == self.groups - 1 else min(rows, (index + 1) * each - first)
            yield slice(place, stop), index, first + place - index * each
            place = stop

    def to_sharded_post_forward_dtensor(self, tensor: Tensor) -> Any:
        """The part that is kept, as a dtype that may require a gradient."""
        return super().to_sharded_post_forward_dtensor(tensor.view(torch.float8_e4m3fn))

    def init_unsharded_param(self) -> None:
        """Hand the gathered rows to products; made once, a placeholder of no elements is the parameter."""
        if hasattr(self, "_unsharded_param"):
            return
        gathered = self.all_gather_outputs[0]
        nothing = gathered[: self.used.itemsize].view(self.used).expand(self._orig_size)
        self._unsharded_param = nn.Parameter(nothing, requires_grad=self.sharded_param.requires_grad)
        self.matrix.rows = gathered.view(self.gathered_size)[: self._orig_size[0]]
        attach(self._unsharded_param, self.matrix)
