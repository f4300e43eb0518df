"""Unsharded parameters: without FSDP2, gathers and reduction buffers.

With one data rank there is nothing to gather and nothing to reduce. A parameter that is stored in the dtype in which it is used, and whose
gradients autograd makes in `precision.grads`, is used as it is. Any other parameter is substituted while its module runs: the module has
another parameter in its place, which shares its storage or is a copy in `precision.params`, and autograd leaves the gradient there.

Groups are those of FSDP2 (`megarun.parallel.apply.fsdp`): a layer's expert bank, a unit of layers, and all parameters outside of the
layers; with `sharding.wrap: stage` the stage is one group. A group's copies are filled before its forward and, if
`sharding.reshard_after_forward` freed them after it, before its backward. When its backward is done, its gradients are cast into the stored
parameters' first gradients, all in one launch, or added to them; without a pipeline its copies are then freed, with one they stay until the
step ends.

Under `sharding.mode: ddp` every data rank has its parameters whole, and the gradients of a group are a bucket: one all-reduce sums them.
Without a pipeline it starts when the group's backward of the last microbatch is done, during the backward of the groups before it; with
one, when a stage's last backward is done. In `precision.grads` gradients are summed in place, so a bucket takes no further memory. In
another `precision.reduce` a bucket is a cast, and lives until the next one is made: its sum is then copied back into the gradients.

Source: torch/nn/parallel/distributed.py (`gradient_as_bucket_view`, `no_sync`) and
torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py (`bf16_compress_hook`).
"""

from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import AllreduceCoalescedOptions
from torch.utils._pytree import tree_flatten, tree_unflatten

from megaplan.spec.models import Spec
from megarun.dtypes import TORCH_DTYPES
from megarun.model.moe import banks_of
from megarun.model.norm import used_dtype
from megarun.model.stage import Stage
from megarun.parallel.groups.mesh import RankMesh


class Lent(NamedTuple):
    """A parameter in use: `used` takes the place of `stored` in a module.

    Attributes:
        module: Module that has the parameter.
        name: Name of the parameter there.
        stored: The parameter that the optimizer updates.
        used: The parameter that the module computes with.
        copied: True if `used` has its own storage.
    """

    module: nn.Module
    name: str
    stored: nn.Parameter
    used: nn.Parameter
    copied: bool

    @property
    def sums(self) -> bool:
        """True if autograd adds a gradient to those of earlier microbatches by itself."""
        return self.used.dtype is (self.stored.grad_dtype or self.stored.dtype)

    def lend(self) -> None:
        """Substitute the used parameter, with the gradient sum so far if autograd adds to it."""
        self.module._parameters[self.name] = self.used
        if self.sums:
            self.used.grad = self.stored.grad

    def add(self, gradient: Tensor) -> None:
        """Add a gradient, which is in no `.grad`, to the stored parameter's."""
        made = self.stored.grad_dtype or self.stored.dtype
        add_gradient(self.stored, gradient if self.stored.grad is not None else gradient.to(made))
        if self.sums:
            self.used.grad = self.stored.grad

    def give_back(self) -> None:
        """Restore the stored parameter, and free a copy."""
        self.module._parameters[self.name] = self.stored
        if self.copied:
            self.used.untyped_storage().resize_(0)


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient in place; the first one becomes it."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


class Bucket:
    """The sum of one group's gradients over the ranks with copies of the parameters, in another dtype than the gradients'.

    The groups of a stage share one, so that casts of only one group exist at a time.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """Start empty."""
        self.dtype = dtype
        self._gradients: list[Tensor] = []
        self._values: list[Tensor] = []
        self._work: dist.Work | None = None

    def start(self, gradients: list[Tensor], copies: dist.ProcessGroup) -> None:
        """End the sum before, and start that of these gradients."""
        self.end()
        self._gradients, self._values = gradients, [gradient.to(self.dtype) for gradient in gradients]
        self._work = started_sum(self._values, copies)

    def end(self) -> None:
        """Make the device wait for the sum, and copy it into the gradients."""
        if self._work is not None:
            self._work.wait()
            torch._foreach_copy_(self._gradients, self._values)
        self.drop()

    def drop(self) -> None:
        """Free the casts."""
        self._gradients, self._values, self._work = [], [], None


def started_sum(values: list[Tensor], copies: dist.ProcessGroup) -> dist.Work:
    """An asynchronous sum in place over ranks."""
    options = AllreduceCoalescedOptions()
    options.asyncOp = True
    return copies.allreduce_coalesced(values, options)


class WholeGroup:
    """The parameters of modules and of their submodules that are in no other group.

    Attributes:
        due: True if the next backward's end sums the gradients over the ranks with copies of the parameters.
    """

    def __init__(
        self, names: list[tuple[nn.Module, str]], spec: Spec, used: torch.dtype, copies: dist.ProcessGroup | None, bucket: Bucket | None
    ) -> None:
        """Start without copies: parameters have no storage yet. Without a bucket gradients are summed where they are."""
        self.due, self._copies, self._bucket = False, copies, bucket
        self._work: dist.Work | None = None
        self._names = names
        self._used, self._made = used, TORCH_DTYPES[spec.precision.grads]
        self._frees_after_forward, self._keeps = spec.sharding.reshard_after_forward, spec.mesh.is_pipelined
        self._members: list[Lent] | None = None
        self._running = False

    @property
    def members(self) -> list[Lent]:
        """The lent parameters of the group."""
        if self._members is None:
            found = ((module, name, module.get_parameter(name)) for module, name in self._names)
            self._members = [self._lent(*each) for each in found if self._is_lent(each[2])]
        return self._members

    def _is_lent(self, stored: nn.Parameter) -> bool:
        if not stored.is_floating_point():
            return False  # packed rows are used without a cast
        return stored.dtype is not self._used or (stored.requires_grad and self._used is not self._made)

    def _lent(self, module: nn.Module, name: str, stored: nn.Parameter) -> Lent:
        copied = stored.dtype is not self._used
        values = torch.empty_like(stored, dtype=self._used) if copied else stored.detach()
        if copied:
            values.untyped_storage().resize_(0)
        return Lent(module, name, stored, nn.Parameter(values, requires_grad=stored.requires_grad), copied)

    def fill(self) -> None:
        """Lend every parameter that is not lent yet."""
        if self._running:
            return
        self._running = True
        copied = [member for member in self.members if member.copied]
        if copied:
            values = [member.used.detach() for member in copied]
            for value in values:
                value.untyped_storage().resize_(value.numel() * value.element_size())
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(values)):
                torch._foreach_copy_(values, [member.stored.detach() for member in copied])
        for member in self.members:
            member.lend()

    def release(self) -> None:
        """Give every parameter back and free the copies."""
        if self._running:
            self._running = False
            for member in self.members:
                member.give_back()

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients that a backward has left to the stored parameters."""
        first: list[Lent] = []
        for member in self.members:
            gradient = member.used.grad
            if gradient is None:
                continue
            if member.sums:
                member.stored.grad = gradient
                member.used.grad = gradient if self._running else None
            elif member.stored.grad is None:
                first.append(member)
            else:
                member.stored.grad.add_(gradient)
                member.used.grad = None
        if first:
            made = [torch.empty_like(member.stored, dtype=self._made) for member in first]
            torch._foreach_copy_(made, [member.used.grad for member in first if member.used.grad is not None])
            for member, gradient in zip(first, made, strict=True):
                member.stored.grad, member.used.grad = gradient, None

    @property
    def is_followed(self) -> bool:
        """True if something is to do when a backward is done."""
        return bool(self.members) or self._copies is not None

    def end_backward(self) -> None:
        """Called when all gradients of a backward are made."""
        if not self._keeps:
            self.release()
        self.collect()
        self.start_sum()

    def start_sum(self) -> None:
        """Sum the gradients over the ranks with copies of the parameters, if that is due; the device continues meanwhile."""
        if self._copies is None or not self.due:
            return
        self.due = False
        gradients = [gradient for module, name in self._names if (gradient := module.get_parameter(name).grad) is not None]
        if not gradients:
            return
        if self._bucket is None:
            self._work = started_sum(gradients, self._copies)
        else:
            self._bucket.start(gradients, self._copies)

    def end_sum(self) -> None:
        """Make the device wait for the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def end_forward(self) -> None:
        """Called after a forward; a backward that runs a module again leaves its parameters lent."""
        if self._frees_after_forward and not _in_backward():
            self.release()


class WholeState:
    """The groups of a stage."""

    def __init__(self, stage: Stage, spec: Spec, mesh: RankMesh) -> None:
        """Make the groups of a meta stage, and have its modules call them."""
        taken: set[nn.Module] = set()
        self.groups: list[WholeGroup] = []
        dense, banked = (mesh.copies_group(bank=bank) if spec.sharding.copies else None for bank in (False, True))
        made, reduced = TORCH_DTYPES[spec.precision.grads], TORCH_DTYPES[spec.precision.reduce]
        self._bucket = Bucket(reduced) if spec.sharding.copies and reduced is not made else None
        for unit in stage.units(spec.sharding.unit_layers):
            used = used_dtype(unit[0], spec.precision)
            for bank in chain.from_iterable(map(banks_of, unit)):
                self._watch([bank], self._group([bank], taken, spec, used, banked))
            self._watch(unit, self._group(unit, taken, spec, used, dense))
        self._root = self._group([stage], taken, spec, used_dtype(stage, spec.precision), dense)
        self._root._frees_after_forward = False  # its backward follows at once
        self._watch([stage], self._root)
        self._awaited = False
        self._lent: dict[Tensor, Lent] = {}
        stage.whole_state = self  # type: ignore[assignment]  # no module

    def _group(self, unit: list[Any], taken: set[nn.Module], spec: Spec, used: torch.dtype, copies: dist.ProcessGroup | None) -> WholeGroup:
        own = [each for module in unit for each in module.modules() if each not in taken]
        taken.update(own)
        names = [(each, name) for each in own for name, _ in each.named_parameters(recurse=False)]
        self.groups.append(WholeGroup(names, spec, used, copies, self._bucket))
        return self.groups[-1]

    def _watch(self, unit: list[Any], group: WholeGroup) -> None:
        """Have the modules of a group, which run one after another, call it."""

        def before(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            group.fill()
            return _followed(group, inputs, keywords) if group.is_followed and torch.is_grad_enabled() else (inputs, keywords)

        def after(_: nn.Module, __: Any, output: Any) -> None:
            group.end_forward()
            if group.is_followed and torch.is_grad_enabled():
                for each in tree_flatten(output)[0]:
                    if isinstance(each, Tensor) and each.requires_grad:
                        each.register_hook(start)  # type: ignore[no-untyped-call]

        def start(_: Tensor) -> None:
            if not self._awaited:
                self._awaited = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            group.fill()

        def kept(module: nn.Module, hook: Any) -> Any:
            return hook if module._compiled_call_impl is None else torch._dynamo.disable(hook)  # type: ignore[no-untyped-call]

        unit[0].register_forward_pre_hook(kept(unit[0], before), prepend=True, with_kwargs=True)
        unit[-1].register_forward_hook(kept(unit[-1], after))

    def _end(self) -> None:
        """End a backward: of groups whose inputs need no gradient, and of the stage's own."""
        self._awaited = False
        for group in self.groups:
            group.end_backward()

    def release(self) -> None:
        """Give all parameters back: before the optimizer updates them."""
        for group in self.groups:
            group.release()
            group.collect()

    def sum_next(self) -> None:
        """Have every group sum its gradients over data ranks when its next backward is done: the last one of a step."""
        for group in self.groups:
            group.due = True

    def start_sums(self) -> None:
        """Start the sums of gradients over data ranks, the last layer's first."""
        for group in reversed(self.groups):
            group.due = True
            group.start_sum()
        self._end_bucket()

    def end_sums(self) -> None:
        """Make the device wait for the sums of gradients over data ranks."""
        for group in self.groups:
            group.end_sum()
        self._end_bucket()

    def _end_bucket(self) -> None:
        if self._bucket is not None:
            self._bucket.end()

    def abandon(self) -> None:
        """Give all parameters back after a forward or backward that has failed, whose gradients are dropped."""
        self._awaited = False
        if self._bucket is not None:
            self._bucket.drop()
        for group in self.groups:
            group.release()
            for member in group.members:
                member.used.grad = member.stored.grad = None

    def lent(self, weight: Tensor) -> Lent | None:
        """The record of a parameter in use; None if it is the stored one."""
        if not self._lent:
            self._lent = {member.used: member for group in self.groups for member in group.members}
        return self._lent.get(weight)


def whole_state(stage: nn.Module) -> WholeState | None:
    """The groups of a stage whose parameters the rank has whole; None if FSDP2 shards them."""
    return getattr(stage, "whole_state", None)


class _EndOfBackward(torch.autograd.Function):
    """The identity of a module's inputs; its backward runs when the module's is done."""

    @staticmethod
    def forward(ctx: Any, group: WholeGroup, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Inputs unchanged."""
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients unchanged."""
        ctx.group.end_backward()
        return None, *gradients


def _followed(group: WholeGroup, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a module, such that the group learns when the backward has made their gradients."""
    values, structure = tree_flatten((inputs, keywords))
    places = [place for place, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
    if not places:
        return inputs, keywords
    outputs = _EndOfBackward.apply(group, *(values[place] for place in places))  # type: ignore[no-untyped-call]
    for place, output in zip(places, outputs, strict=True):
        values[place] = output
    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(values, structure)
    return found


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
