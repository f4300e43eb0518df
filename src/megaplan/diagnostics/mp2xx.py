"""MP2xx. The mesh and its degrees."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

MESH: dict[str, CodeInfo] = {
    "MP201": CodeInfo(
        "tensor degree does not divide what it shards",
        "`mesh.tp` does not divide the number of heads, key-value heads, groups, or the width of an MLP.",
        "Tensor parallelism gives every rank whole heads, whole groups and equal slices of an MLP; a head is never split.",
        "Use a common divisor of all the counts named.",
        "attention: {kind: gqa, num_heads: 32, num_kv_heads: 8, head_dim: 128}\nmesh: {tp: 16}      # wrong: 8 % 16 = 8\nmesh: {tp: 8}",
    ),
    "MP202": CodeInfo(
        "tensor degree does not divide the sequence",
        "With tensor parallelism the residual stream is sharded along the sequence, and the positions do not divide evenly.",
        "Sequence parallelism is on exactly when `mesh.tp` > 1; every rank holds the same number of positions.",
        "Use a sequence length that is a multiple of cp · tp.",
        "batch: {micro_batch_size: 1, seq_length: 4090}\nmesh: {tp: 4}      # wrong: 4090 % 4 = 2",
    ),
    "MP203": CodeInfo(
        "expert degree does not divide the routed experts",
        "`mesh.ep` does not divide `moe.num_experts`.",
        "Every rank of the expert axis owns the same number of whole experts.",
        "Use a divisor of the number of experts.",
        "moe: {num_experts: 16, top_k: 4, ffn_hidden_size: 896}\nmesh: {ep: 6}      # wrong: 16 % 6 = 4\nmesh: {ep: 8}",
    ),
    "MP204": CodeInfo(
        "expert axes without experts",
        "`mesh.ep` or `mesh.etp` is above 1, and the pattern has no E block.",
        "The expert axes shard routed experts and nothing else: they cannot shrink a dense layer.",
        "Set them to 1, or add E blocks.",
        "model: {pattern: AD}\nmesh: {ep: 8}      # wrong\nmesh: {dp_shard: 8}",
    ),
    "MP205": CodeInfo(
        "expert axes do not divide the ranks they share",
        "ep · etp does not divide dp_shard · cp · tp.",
        "The expert axes are not factors of the world size: they regroup the ranks of dp_shard, cp and tp.",
        "Use degrees whose product divides dp_shard · cp · tp, or raise dp_shard.",
        "mesh: {dp_shard: 4, ep: 8}      # wrong: 4 % 8 = 4\nmesh: {dp_shard: 8, ep: 8}",
    ),
    "MP206": CodeInfo(
        "expert tensor degree does not divide the expert's width",
        "`mesh.etp` does not divide `moe.ffn_hidden_size`.",
        "Expert tensor parallelism gives every rank an equal slice of each expert it owns.",
        "Use a divisor of the expert's width.",
        "moe: {num_experts: 16, top_k: 4, ffn_hidden_size: 896}\nmesh: {tp: 3, etp: 3}      # wrong: 896 % 3 = 2",
    ),
    "MP207": CodeInfo(
        "a sequence piece is shorter than the convolution's history",
        "Under context parallelism a piece of seq_length / (2 · cp) positions is shorter than conv_kernel − 1.",
        "A convolution takes its earlier inputs only from the piece directly before.",
        "Use a longer sequence, or a smaller cp.",
        "mamba: {kind: mamba2, conv_kernel: 4}\nbatch: {micro_batch_size: 1, seq_length: 16}\nmesh: {cp: 4}      # wrong: pieces of 2",
    ),
    "MP208": CodeInfo(
        "context degree does not divide the sequence",
        "The sequence does not divide into 2 · cp equal pieces.",
        "Under causal attention later positions cost more; each rank gets one early and one late piece, so that all have equal work.",
        "Use a sequence length that is a multiple of 2 · cp.",
        "batch: {micro_batch_size: 1, seq_length: 4098}\nmesh: {cp: 2}      # wrong: 4098 % 4 = 2",
    ),
    "MP209": CodeInfo(
        "tensor groups cross nodes",
        "A tensor-parallel group has ranks on more than one node.",
        "Its collectives run in every block, on the critical path; between nodes they have a tenth of the bandwidth.",
        "Keep tp within `device.per_node`, and let it divide that number.",
        "mesh: {tp: 16}\ndevice: {name: h200, per_node: 8}      # crosses",
    ),
    "MP210": CodeInfo(
        "expert groups cross nodes",
        "A group of ep · etp ranks has ranks on more than one node.",
        "Every E block sends each token's rows to the ranks of its experts and back; an all-to-all cannot combine several network cards.",
        "Keep ep · etp within `device.per_node`, and let it divide that number.",
        "mesh: {dp_shard: 32, ep: 32}\ndevice: {name: h200, per_node: 8}      # crosses",
    ),
    "MP211": CodeInfo(
        "the mesh has too many ranks",
        "The product of the degrees is above the largest job that megaplan supports.",
        "A budget lists every rank; a number this large is almost always a typing error.",
        "Correct the degrees. The expert axes are not factors of the product.",
        "mesh: {dp_shard: 1048576, tp: 8}      # wrong",
    ),
    "MP212": CodeInfo(
        "more stage slots than layers",
        "There are fewer layers than pp · vpp slots, so a slot would be empty.",
        "An empty stage would idle, and deadlocks some runtimes.",
        "Use fewer stages or virtual stages, or more layers.",
        "model: {num_layers: 4}\nmesh: {pp: 8}      # wrong",
    ),
    "MP217": CodeInfo(
        "sequence parallelism is not a mesh axis",
        "The mesh names a degree for sequence parallelism.",
        "It has no degree of its own and shards no parameters: it is on exactly when tp > 1, over the same ranks.",
        "Remove the key; set `mesh.tp`.",
        "mesh: {tp: 8, sp: 8}      # wrong\nmesh: {tp: 8}",
    ),
}
