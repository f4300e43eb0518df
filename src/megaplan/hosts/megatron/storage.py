"""Parameters, gradients and optimizer state of a rank's chunks.

Source: `megatron/core/distributed/param_and_grad_buffer.py`, `megatron/core/optimizer/`, at d98e8a64.
"""

from collections import Counter
from typing import NamedTuple

from megaplan.hosts.megatron.layer_wise import Layout, Matrix, bucket_elements, layout_of
from megaplan.hosts.megatron.pattern import EMBEDDING, LOSS, MTP, operators
from megaplan.hosts.megatron.run import MegatronRun, MegatronStage
from megaplan.hosts.megatron.setting import num_statistics
from megaplan.hosts.megatron.state import adam_bytes, masters_stay, muon_bytes
from megaplan.hosts.megatron.tensors import Parameters, Rule, Tensor
from megaplan.hosts.values import HostBytes
from megaplan.low_precision import history_bytes
from megaplan.spec.host import Host
from megaplan.spec.models import Spec

LOW_WEIGHTS = "low-precision weights"
"""Copies of 16-bit weights in 8 or 4 bits, row-wise and column-wise, with their scales; made at the first forward and kept."""
HISTORIES = "amax histories"
PARAMETER_PADDING, GRADIENT_PADDING = "padding of parameters", "padding of gradients"
"""Padding of the buffers of Muon's matrices, of all operators of a stage together."""
FSDP_UNIT_ELEMENTS = 1_000_000_000
"""The least size that Megatron-FSDP takes for its unit of communication; it gathers half of one ahead."""
WHOLE = ((False, 1), (True, 1))
"""Dense parameters and experts', each on one rank."""


def parameters(stage: MegatronStage) -> Parameters:
    """The parameters of the rank's chunks."""
    found, run, letters = Parameters(), stage.run, stage.letters
    spec, hidden = stage.spec, stage.run.at.dims.hidden
    depth, recipe = letters.count(MTP), spec.precision.recipe
    rows = spec.model.vocab_size // spec.mesh.tp
    embeds = EMBEDDING in letters or (depth > 0 and spec.mesh.pp > 1)  # a prediction module reads a copy of the embedding
    copies = int(embeds) + int(LOSS in letters)
    for place in range(min(copies, 1) if spec.model.tie_embeddings else copies):
        of_head = LOSS in letters and place == 0 and recipe is not None and recipe.head
        found.add(rows * hidden, Rule.VOCABULARY, low=(rows, hidden) if of_head else None)
    if LOSS in letters:  # the head's weight gradient has a dummy, like every linear's
        found.shapes.add((rows, hidden))
    for letter in letters:
        if letter == EMBEDDING:
            found.add((spec.model.learned_positions or 0) * hidden, Rule.VOCABULARY, sharded=False)
        elif letter == LOSS:
            for _ in range(num_statistics(spec)):  # the final norm's weight, and the bias of a LayerNorm
                found.add(hidden, sharded=False)
        elif letter != MTP:
            found.join(run.parameters(letter))
    for _ in range(min(depth, 1) if spec.host.mtp_repeated else depth):
        for letter in (*run.ahead, MTP):
            found.join(run.parameters(letter))
    return found


class State(NamedTuple):
    """Bytes of optimizer state on a rank: masters and moments of the matrices of blocks, and of everything else."""

    matrix_master: int
    matrix_moments: int
    other_master: int
    other_moments: int

    @property
    def moments(self) -> int:
        """State that the first step makes."""
        return self.matrix_moments + self.other_moments

    @property
    def total(self) -> int:
        """All four."""
        return self.matrix_master + self.other_master + self.moments


def storage_bytes(stage: MegatronStage, found: Parameters) -> dict[str, int]:
    """Bytes by part: parameters as they are stored, main gradients, optimizer state, copies of weights in low precision."""
    run, precision, kinds = stage.run, stage.spec.precision, _kinds(stage) if is_fsdp(stage) else WHOLE
    kept = sum([found.elements(experts=experts) // ranks for experts, ranks in kinds])
    stored = (
        sum([_stored_bytes(run, found, experts=experts) // ranks for experts, ranks in kinds])
        if precision.recipe
        else run.at.element_bytes * kept
    )
    gradient = _gradient_bytes(stage)
    parts = {"parameters": stored, "gradients": gradient * kept}
    if padding := sum(padding_elements(stage, found)):
        parts |= {PARAMETER_PADDING: run.at.element_bytes * padding, GRADIENT_PADDING: gradient * padding}
    parts["optimizer"] = optimizer_state(stage, found).total
    recipe, given = run.at.recipe, precision.recipe
    if recipe is not None and given is not None:
        shapes = [one.low for one in found.tensors if one.low is not None]
        if not given.param_gather:
            parts[LOW_WEIGHTS] = sum(recipe.both_bytes(*shape, weight=True) for shape in shapes)
        if recipe.name == "fp8_delayed":
            parts[HISTORIES] = history_bytes(given.amax_history) * len(shapes)
    return parts


def _gradient_bytes(stage: MegatronStage) -> int:
    """Bytes of a parameter's gradient between steps.

    DeepSpeed's optimizer of bf16 pipelines sums in fp32 and sets the 16-bit gradients of backward to zero in place, so that both stay
    (`clear_lp_grads` of deepspeed/runtime/bf16_optimizer.py).
    """
    summed, made = stage.spec.precision.grads.bytes, stage.run.at.element_bytes
    return summed + (made if stage.spec.host.all_reduce_gradients and summed > made else 0)


def _stored_bytes(run: MegatronRun, found: Parameters, *, experts: bool) -> int:
    """Bytes of routed experts, or of everything else, as stored, before sharding."""
    return sum([number * stored_bytes(run, one) for one, number in found.counts.items() if one.rule.is_expert is experts])


def is_fsdp(stage: MegatronStage) -> bool:
    """True if Megatron-FSDP shards parameters and gradients as well as optimizer state over data ranks."""
    return stage.spec.sharding.reshard_after_forward


def stored_bytes(run: MegatronRun, tensor: Tensor) -> int:
    """Bytes of a parameter on its rank: in its dtype, or of a weight's low-precision copies if only these are stored."""
    given, recipe = run.spec.precision.recipe, run.at.recipe
    if given is None or recipe is None or not given.param_gather or tensor.low is None:
        return run.at.element_bytes * tensor.elements
    sharded = run.spec.sharding.reshard_after_forward
    return recipe.rowwise_bytes(*tensor.low, weight=True) if sharded else recipe.both_bytes(*tensor.low, weight=True)


class Gathered(NamedTuple):
    """Bytes that Megatron-FSDP holds beyond its shards at two points of a step."""

    loss: int
    first_layer_backward: int


def gathered_bytes(stage: MegatronStage, found: Parameters) -> Gathered:
    """Bytes that Megatron-FSDP has unsharded: parameters at the loss; parameters and gradients when backward reaches the first layer.

    A layer is a unit; parameters outside layers stay gathered. The final norm's gather also fetches the first layers, up to 500 million
    elements, which forward had released; only their own backward releases them again. Unsharded gradients wait for their reduction until
    they have 1,000 million elements, or two layers of the mean size, in the dtype in which they are reduced. Double buffers, of parameters
    and of gradients, are never released.

    Source: `suggested_communication_unit_size` in `megatron_fsdp.py`, `all_gather_params`,
    `wait_for_previous_grad_reduce` and `FixedPoolAllocator` of `param_and_grad_buffer.py`.
    """
    if not is_fsdp(stage):
        return Gathered(0, 0)
    host, recipe, gradient_bytes = stage.spec.host, stage.run.at.recipe, stage.spec.precision.reduce.bytes
    units = _units(stage)
    inside, first, stored = sum(unit.elements for unit in units), units[0], stage.run.at.element_bytes
    elements = found.elements(experts=False) + found.elements(experts=True)
    root, size = elements - inside, host.fsdp_unit_elements or FSDP_UNIT_ELEMENTS
    transposes = recipe is not None and recipe.transposes  # made for a layer's backward, and freed unless they are kept
    kept, transposed = (inside, 0) if transposes and host.fsdp_keeps_transposes else (0, first.elements * transposes)
    if host.fsdp_double_buffer or host.fsdp_max_pool:  # the latter option enables the former
        always, passing = _double_buffered(host, units, root, gradient_bytes)
        return Gathered(stored * root + kept + always, stored * root + kept + always + passing + transposed)
    waiting = min(max(size, 2 * inside // len(units)) + first.elements, elements)
    first_layer = stored * root + first.stored_bytes + transposed + gradient_bytes * waiting
    return Gathered(stored * root + kept + _gathered_ahead(units, size // 2), kept + first_layer)


class _Unit(NamedTuple):
    """A layer, which Megatron-FSDP gathers and reduces as a unit: elements on a rank, and gathered bytes."""

    elements: int
    stored_bytes: int


def _units(stage: MegatronStage) -> list[_Unit]:
    """The layers in order, then the prediction modules' layers: two operators each in a GPTModel, one in a HybridModel."""
    run, depth, width = stage.run, stage.letters.count(MTP), stage.spec.host.block_layers
    letters = operators(stage.letters) + run.ahead * (min(depth, 1) if stage.spec.host.mtp_repeated else depth)
    of_letter = {
        letter: _Unit(
            sum(number * one.elements for one, number in own.counts.items()),
            sum(number * stored_bytes(run, one) for one, number in own.counts.items()),
        )
        for letter in set(letters)
        if (own := run.parameters(letter))
    }
    groups = [[of_letter[letter] for letter in letters[start : start + width]] for start in range(0, len(letters), width)]
    return [_Unit(sum(one.elements for one in group), sum(one.stored_bytes for one in group)) for group in groups]


def _double_buffered(host: Host, units: list[_Unit], root: int, gradient_bytes: int) -> tuple[int, int]:
    """Bytes of buffers that stay, and of those that exist only during the first layer's backward; `root` elements are outside layers.

    Two buffers are of the most numerous layers of one size, or of the largest layer and serve all. Layers that they do not serve have
    separate memory while they run, or also buffers that stay.

    Source: `FixedPoolAllocator` and `MaxPoolAllocator` of `param_and_grad_buffer.py`.
    """
    pooled, number = (max(units), len(units)) if host.fsdp_max_pool else Counter(units).most_common(1)[0]
    others = [] if host.fsdp_max_pool else [unit for unit in units if unit != pooled]
    stay = min(2, number) * (pooled.stored_bytes + gradient_bytes * pooled.elements)
    if host.fsdp_persistent_buffers:
        return stay + gradient_bytes * root + sum([unit.stored_bytes + gradient_bytes * unit.elements for unit in others]), 0
    return stay, units[0].stored_bytes + gradient_bytes * units[0].elements if units[0] in others else 0


def _gathered_ahead(units: list[_Unit], elements: int) -> int:
    """Bytes of the first layers that hold so many elements, or of all."""
    held, size = 0, 0
    for unit in units:
        if held >= elements:
            break
        held, size = held + unit.elements, size + unit.stored_bytes
    return size


def gradient_copies_bytes(stage: MegatronStage, found: Parameters) -> int:
    """fp32 copies of 16-bit gradients that the optimizer's step makes; the next step drops them before its first forward.

    Source: `_copy_model_grads_to_main_grads` and `zero_grad` of `megatron/core/optimizer/optimizer.py`.
    """
    each = adam_bytes(stage.spec).gradient
    return sum(_copied(stage, each * found.elements(experts=experts) // ranks) for experts, ranks in _kinds(stage))


def unscaled_bytes(stage: MegatronStage, found: Parameters) -> int:
    """fp32 copies of states that Adam's kernel makes and frees; experts have a separate optimizer, which steps second."""
    if uses_muon(stage.spec):
        return 0
    each = adam_bytes(stage.spec).unscaled
    return max(each * found.elements(experts=experts) // ranks for experts, ranks in _kinds(stage))


def offloaded_state_bytes(stage: MegatronStage, found: Parameters) -> HostBytes:
    """Bytes of a rank's optimizer on the host: pinned masters and gradients, and moments.

    Source: `HybridDeviceOptimizer` of `megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py`.
    """
    fraction = stage.spec.host.optimizer_offload
    if fraction is None:
        return HostBytes(0, 0)
    elements = sum(int(fraction * (found.elements(experts=experts) // ranks)) for experts, ranks in _kinds(stage))
    return HostBytes(2 * 4 * elements, 2 * 4 * elements)


def optimizer_state(stage: MegatronStage, found: Parameters) -> State:
    """Under Muon a master and one momentum of each of its matrices, under Adam a master and two moments.

    Adam's distributed optimizer shards evenly. Muon assigns unsharded tensors to data ranks: by its buffer's layout, or sorted by size in
    alternating order.
    """
    adam, kinds = adam_bytes(stage.spec), _kinds(stage)
    if not uses_muon(stage.spec):
        found_bytes = []
        for matrix in (True, False):
            some = [(one, number) for one, number in found.counts.items() if one.rule.is_matrix is matrix]
            sizes = [
                (sum(number * one.elements for one, number in some if one.rule.is_expert is experts), ranks) for experts, ranks in kinds
            ]
            for each, here in ((adam.master, _copied), (adam.moments, _here)):
                found_bytes.append(sum(here(stage, each * elements // ranks) for elements, ranks in sizes))
        return State(*found_bytes)
    muon = muon_bytes(stage.spec)
    kept = {True: 0, False: 0}
    for (experts, ranks), index in zip(kinds, (stage.data_index, stage.expert_index), strict=True):
        dealt = dealt_elements(stage, found, ranks, experts=experts)
        place = ranks - 1 if index is None else index
        matrices, others = dealt[place] if place < len(dealt) else (0, 0)
        kept[True] += matrices
        kept[False] += others
    return State(muon.master * kept[True], muon.moments * kept[True], adam.master * kept[False], adam.moments * kept[False])


def uses_muon(spec: Spec) -> bool:
    """True if Muon steps the matrices of blocks."""
    return "muon" in spec.optimizer.matrix


def dealt_elements(stage: MegatronStage, found: Parameters, ranks: int, *, experts: bool) -> list[tuple[int, int]]:
    """Elements of Muon's matrices and of everything else that each data rank steps; ranks after the last of the list step none."""
    key = ranks, experts, len(found.tensors)
    if key not in found.dealt:
        whole = stage.spec.host.layer_wise_layout
        found.dealt[key] = _arranged(stage, found, ranks, experts=experts) if whole else _dealt_elements(found, ranks, experts=experts)
    return found.dealt[key]


def _arranged(stage: MegatronStage, found: Parameters, ranks: int, *, experts: bool) -> list[tuple[int, int]]:
    """Matrices by the layouts of the chunks' buffers; everything else is sharded evenly."""
    layouts = _layouts(stage, found)[experts]
    others = sum(one.elements for one in found.tensors if one.rule.is_expert is experts and not one.rule.is_matrix)
    shares = [sum(layout.shares[rank] for layout in layouts) for rank in range(ranks)]
    return [(share, others // ranks) for share in shares]


def padding_elements(stage: MegatronStage, found: Parameters) -> tuple[int, int]:
    """Elements of padding in the buffers of Muon's matrices: of dense ones, and of experts' where these have their own data ranks."""
    if not stage.spec.host.layer_wise_layout:
        return 0, 0
    layouts = _layouts(stage, found)
    dense, experts = (sum(each.elements - sum(each.shares) for each in layouts[kind]) for kind in (False, True))
    return dense, experts


def _layouts(stage: MegatronStage, found: Parameters) -> dict[bool, list[Layout]]:
    """Buffers of each model chunk by kind: of dense matrices, and of experts' where these have their own data ranks.

    Reductions of the first stage's first chunk alone overlap its backward by buckets.
    """
    if found.layouts:
        return found.layouts
    mesh, overlaps = stage.spec.mesh, bool(stage.spec.host.dp_comm_overlap) and stage.pp_rank == 0
    separate = mesh.ep > 1 or mesh.etp != mesh.tp
    layouts: dict[bool, list[Layout]] = {}
    for experts, ranks in _kinds(stage):
        layouts[experts] = []
        for index, letters in enumerate(stage.chunks):
            own = found if len(stage.chunks) == 1 else parameters(stage._replace(chunks=(letters,)))
            matrices = [one for one in own.tensors if one.rule.is_matrix and (one.rule.is_expert and separate) is experts]
            bucket = bucket_elements(_data_ranks(stage)) if overlaps and index == 0 else None
            layouts[experts].append(layout_of([Matrix(one.elements, one.work) for one in matrices], ranks, bucket))
    found.layouts.update(layouts)
    return layouts


def _dealt_elements(found: Parameters, ranks: int, *, experts: bool) -> list[tuple[int, int]]:
    tensors = sorted((one for one in found.tensors if one.rule.is_expert is experts), key=lambda one: one.elements)
    busy = min(ranks, len(tensors))
    matrices, others = [0] * busy, [0] * busy
    for place, one in enumerate(tensors):
        turn, step = divmod(place, ranks)
        rank = ranks - 1 - step if turn % 2 else step
        (matrices if one.rule.is_matrix else others)[rank] += one.elements
    return list(zip(matrices, others, strict=True))


def _kinds(stage: MegatronStage) -> tuple[tuple[bool, int], tuple[bool, int]]:
    """Dense parameters and experts', each with the ranks that share their optimizer state."""
    shared = stage.spec.host.distributed_optimizer
    return (False, _data_ranks(stage) if shared else 1), (True, stage.spec.mesh.efsdp if shared else 1)


def _here(stage: MegatronStage, size: int) -> int:
    """Bytes of state on the device if a fraction of it is on the host."""
    return size - int(size * (stage.spec.host.optimizer_offload or 0))


def _copied(stage: MegatronStage, size: int) -> int:
    """Bytes on the device of state that the host may have instead: masters, and fp32 copies of gradients."""
    return size if masters_stay(stage.spec) else _here(stage, size)


def _data_ranks(stage: MegatronStage) -> int:
    """Ranks over which dense state is sharded, contexts included."""
    return stage.spec.mesh.dp_shard * stage.spec.mesh.cp
