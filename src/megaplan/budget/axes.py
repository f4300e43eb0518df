"""Effects of each mesh axis, and costs that it does not change (R-20): the text of `megaplan explain AXIS`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis, or a setting that is mistaken for an axis.

    Attributes:
        title: Full name.
        shards: Tensors that it divides.
        cannot_fix: Memory that it does not change.
        costs: Communication and memory that it adds.
    """

    title: str
    shards: str
    cannot_fix: str
    costs: str


AXES: dict[str, Axis] = {
    "pp": Axis(
        "pipeline parallel",
        "Layers: each rank holds the blocks of its slots, their states and activations.",
        "One block that is too large. In-flight activations do not shrink either: the first ranks hold pp microbatches of 1 / pp of the "
        "layers.",
        "Receive buffers that grow with the number of microbatches, whole accumulated gradients, idle time at both ends.",
    ),
    "vpp": Axis(
        "virtual pipeline: slots per rank",
        "Nothing: a rank holds the same number of layers as before, in more chunks.",
        "Memory. It shortens idle time and raises the in-flight counts of the early chunks.",
        "More boundaries to send, and receive buffers for each of them.",
    ),
    "dp_replicate": Axis(
        "data parallel, replicated",
        "Sequences of the global batch.",
        "Any byte of parameters, gradients or optimizer: every replica holds them all.",
        "One all-reduce of gradient shards per step; under `sharding.mode: ddp` of unsharded gradients, during the last backward.",
    ),
    "dp_shard": Axis(
        "data parallel, sharded (FSDP2)",
        "Resident parameters, gradient shards and optimizer state, unless `sharding.mode` is ddp; sequences of the global batch.",
        "Activations of a sequence, and gathered parameters: a block is gathered in full before it runs.",
        "All-gathers of parameters, reduce-scatters of gradients, their buffers.",
    ),
    "cp": Axis(
        "context parallel",
        "The positions of a sequence: activations of every family.",
        "Recurrent state: M and R process a sequence in order, and their state is sent from rank to rank. Parameters and optimizer "
        "state are not sharded.",
        "Keys and values gathered over the axis; ranks wait for the state of M and R; gradients are summed once per step.",
    ),
    "tp": Axis(
        "tensor parallel",
        "Heads and widths of attention, MLP, Mamba and R blocks, and with sequence parallelism the residual stream.",
        "Experts per rank, which ep decides. Embeddings, head, norms and routers are not sharded.",
        "All-gathers of inputs and reductions of partial sums, twice per block; keep it inside one node.",
    ),
    "sp": Axis(
        "sequence parallel: on exactly when tp > 1",
        "The residual stream and the norms between tensor-parallel regions.",
        "Parameters, gradients and optimizer state: it shards none of them.",
        "Nothing: its gathers replace tp's all-reduces.",
    ),
    "ep": Axis(
        "expert parallel: borrows ranks of dp_shard, cp and tp",
        "The stack of routed experts.",
        "Any dense layer: attention, Mamba, R, D, shared experts, embeddings, norms and routers are as large as before.",
        "Rows travel to their experts and back; with an uneven router, one rank receives more rows than the others.",
    ),
    "etp": Axis(
        "expert tensor parallel",
        "The width of every routed expert.",
        "The number of experts a rank holds, and the number of rows: its ranks gather each other's rows.",
        "Gathered rows in every E block, and the reduction of partial results over etp.",
    ),
    "recompute": Axis(
        "activation recompute: no split axis",
        "Nothing: it drops activations and runs their operations again.",
        "Parameters, gradients, optimizer state, gathered copies; routers and dispatch are never recomputed.",
        "The forward of the recomputed operations, once more.",
    ),
    "checkpoint": Axis(
        "saved state: no split axis",
        "Nothing: it is a file.",
        "Memory of a running job.",
        "The time of the write, and a copy in host memory while an asynchronous save runs.",
    ),
}
