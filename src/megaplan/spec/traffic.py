"""Bytes that tensor and expert groups move in a step, for warnings about groups that leave a node (R-37).

Tensor groups: a sharded block all-gathers its input and reduce-scatters its output in forward; backward does both in reverse and gathers
the input again for the weight gradient, since gathered inputs are not kept. A collective over n ranks moves (n − 1) times its local shard n
times, (n − 1) · payload bytes per group (arXiv:2205.05198, section 4.2.2).
Expert groups: dispatch and combine, forward and backward, send (ep − 1) / ep of the routed rows under balanced routing (R-58). Where
megarun gathers tokens (`host.moe_dispatcher`), each token goes to all other ranks of the groups, and its sum is returned.
"""

from megaplan.families.registry import families_of
from megaplan.spec.context import Checked
from megaplan.spec.pattern import DepthBlock, depth_blocks
from megaplan.units import format_bytes

TENSOR_COLLECTIVES = 5
EXPERT_EXCHANGES = 4


def crossing_groups(world_size: int, degree: int, per_node: int) -> int:
    """Number of groups of `degree` consecutive ranks that span more than one node."""
    if degree == 1 or world_size <= per_node or per_node % degree == 0:
        return 0
    return sum(start // per_node != (start + degree - 1) // per_node for start in range(0, world_size, degree))


def tensor_traffic_bytes(checked: Checked) -> int:
    """Bytes that the tensor groups of one pipeline send in a step, over all stages."""
    spec = checked.spec
    return (
        TENSOR_COLLECTIVES * _sharded_blocks(checked) * spec.schedule.microbatches_per_update * (spec.mesh.tp - 1) * _payload_bytes(checked)
    )


def tensor_traffic(checked: Checked) -> str:
    """The formula with its values."""
    spec = checked.spec
    factors = (
        f"{TENSOR_COLLECTIVES} collectives · {_sharded_blocks(checked)} blocks · {spec.schedule.microbatches_per_update} microbatches · "
        f"({spec.mesh.tp} − 1) · {_payload(checked)}"
    )
    return f"the groups of one pipeline send {format_bytes(tensor_traffic_bytes(checked))} per step: {factors}"


def expert_traffic_bytes(checked: Checked) -> int:
    """Bytes that the expert groups over one tensor-and-context group's tokens send in a step, over all stages, under balanced routing."""
    spec, moe = checked.spec, checked.spec.model.moe
    if moe is None:
        return 0
    exchanges = EXPERT_EXCHANGES * _expert_blocks(checked) * spec.schedule.microbatches_per_update
    if spec.host.gathers_tokens:
        return exchanges * (spec.mesh.ep * spec.mesh.etp - 1) * _payload_bytes(checked)
    return exchanges * moe.top_k * _payload_bytes(checked) * (spec.mesh.ep - 1) // spec.mesh.ep


def expert_traffic(checked: Checked) -> str:
    """The formula with its values."""
    spec, moe = checked.spec, checked.spec.model.moe
    top_k = moe.top_k if moe is not None else 0
    copies, when = f"top_k {top_k} · ({spec.mesh.ep} − 1) / {spec.mesh.ep}", " under balanced routing"
    if spec.host.gathers_tokens:
        copies, when = f"({spec.mesh.ep * spec.mesh.etp} − 1)", ""
    factors = (
        f"{EXPERT_EXCHANGES} exchanges · {_expert_blocks(checked)} blocks · {spec.schedule.microbatches_per_update} microbatches · "
        f"{copies} · {_payload(checked)}"
    )
    return f"the tokens of one data rank send {format_bytes(expert_traffic_bytes(checked))} per step{when}: {factors}"


def _payload_bytes(checked: Checked) -> int:
    spec = checked.spec
    positions = spec.batch.micro_batch_size * spec.batch.seq_length // spec.mesh.cp
    return positions * spec.model.hidden_size * spec.precision.params.bytes


def _payload(checked: Checked) -> str:
    spec = checked.spec
    positions = spec.batch.seq_length // spec.mesh.cp
    return f"{spec.batch.micro_batch_size} · {positions} · {spec.model.hidden_size} · {spec.precision.params.bytes} B"


def _sharded_blocks(checked: Checked) -> int:
    model = checked.spec.model
    sharded = [family for family, section in families_of(model) if family.exchanges(section, model.hidden_size, None).sharded]
    own = sum(block.family.exchanges(block.section, model.hidden_size, block.variant).sharded for block in _of_a_depth(checked))
    return sum(checked.count(family.letter) for family in sharded) + own * _depths(checked)


def _expert_blocks(checked: Checked) -> int:
    return checked.count("E") + sum(block.family.banks for block in _of_a_depth(checked)) * _depths(checked)


def _depths(checked: Checked) -> int:
    mtp = checked.spec.model.features.mtp
    return 0 if mtp is None else mtp.depth


def _of_a_depth(checked: Checked) -> tuple[DepthBlock, ...]:
    return depth_blocks(checked.spec.model) if _depths(checked) else ()
