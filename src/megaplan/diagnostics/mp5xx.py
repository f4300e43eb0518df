"""MP5xx. Budget: what does not fit, low headroom, devices."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

BUDGET: dict[str, CodeInfo] = {
    "MP501": CodeInfo(
        "a rank does not fit its device",
        "The peak of at least one rank is larger than the device's capacity less the reserve.",
        "The job would stop with an out-of-memory error at the phase named, on the ranks named.",
        "Cut the column named by the bytes named. The hints are changes that were evaluated, with what they leave.",
        "batch: {micro_batch_size: 8, seq_length: 4096}      # over by 21 GiB\nbatch: {micro_batch_size: 4, seq_length: 4096}      # fits",
    ),
    "MP502": CodeInfo(
        "little headroom is left",
        "The peak of at least one rank is above 80% of what is usable.",
        "Fragmentation and uneven routing come on top. Of 454 published runs none below 80% of its estimate ran out of memory"
        " (arXiv:2411.06465).",
        "Leave it if the run was measured to fit; else cut the column named, or lower batch.micro_batch_size.",
        "headroom 3.10 GiB of 137.49 GiB      # warns\nheadroom 31.0 GiB of 137.49 GiB      # does not",
    ),
    "MP503": CodeInfo(
        "no micro-batch fits",
        "Even one sequence at a time, the worst rank is over its device.",
        "Model states and what does not depend on the batch already take more than is usable.",
        "Shard more (dp_shard, pp, tp, ep), recompute, or shorten batch.seq_length.",
        "mesh: {pp: 1, dp_shard: 8}      # over at micro_batch_size 1\nmesh: {pp: 2, dp_shard: 16}     # fits",
    ),
    "MP504": CodeInfo(
        "the device is not in the data file",
        "device.name names no device that megaplan has figures for.",
        "Capacity, reserve and speed come from the data file, never from a guess.",
        "Use a name that is there.",
        "device: {name: h20}      # wrong\ndevice: {name: h200}     # right",
    ),
    "MP505": CodeInfo(
        "the padding of shards costs memory",
        "More than 1% of the peak is padding: rows that FSDP2 adds to tensors whose rows do not divide by the ranks that share them.",
        "n shards have ceil(rows / n) rows each, and what is gathered holds all n: with fewer rows than shards each further rank adds one.",
        "Use the degree in the hint, or leave it: the numbers are right, the bytes hold zeros.",
        "mesh: {dp_shard: 2048}      # a router of 16 rows is gathered as 2,048\nmesh: {dp_replicate: 2, dp_shard: 1024}",
    ),
    "MP506": CodeInfo(
        "the device has no peak for a dtype",
        "A dtype of precision.params or precision.families is not among the peaks of the device.",
        "The device's matrix units do not multiply that dtype, so no time of it can be stated.",
        "Use a dtype that the device has, or give the peak of an emulation under device.peak_flops.",
        "device: {name: a100-80gb}\nprecision: {params: fp8}      # wrong\nprecision: {params: bf16}     # right",
    ),
}
