"""MP5xx. Budget: what does not fit, low headroom, devices."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

BUDGET: dict[str, CodeInfo] = {
    "MP501": CodeInfo(
        "a rank does not fit its device",
        "The peak of at least one rank is larger than the device's capacity minus the reserve, under the best cuts that were found.",
        "The job would stop with an out-of-memory error in the phase named, on the ranks named.",
        "Append a hint to the command: it then prints the peak that the hint promises. Hints are the smallest changes that fit with the "
        "same global batch, on more GPUs only where none fits on as many; the one with the shortest modelled step comes first.",
        "batch: {micro_batch_size: 8, seq_length: 4096}      # over by 21 GiB\nbatch: {micro_batch_size: 4, seq_length: 4096}      # fits",
    ),
    "MP502": CodeInfo(
        "little headroom is left",
        "The peak of at least one rank is above 80% of what is usable.",
        "Fragmentation and uneven routing add to it. Of 454 published runs none estimated below 80% ran out of memory (arXiv:2411.06465).",
        "Ignore this if the run was measured to fit; otherwise reduce the column named, or lower batch.micro_batch_size.",
        "headroom 3.10 GiB of 137.49 GiB      # warns\nheadroom 31.0 GiB of 137.49 GiB      # does not",
    ),
    "MP504": CodeInfo(
        "the device is not in the data file",
        "megaplan has no data for a device of this name.",
        "Capacity, reserve and speed come from the data file and are never guessed.",
        "Use one of the names listed.",
        "device: {name: h20}      # wrong\ndevice: {name: h200}     # right",
    ),
    "MP505": CodeInfo(
        "shard padding costs memory",
        "More than 1% of the peak is padding: rows that FSDP2 adds to tensors whose rows do not divide by the ranks that share them.",
        "n shards have ceil(rows / n) rows each, and the gathered tensor has all n: with fewer rows than shards each extra rank adds one.",
        "Use the degree in the hint, or accept the padding: results are correct, the padding bytes are zeros.",
        "mesh: {dp_shard: 2048}      # a router of 16 rows is gathered as 2,048\nmesh: {dp_replicate: 2, dp_shard: 1024}",
    ),
    "MP506": CodeInfo(
        "the device has no peak FLOP/s for a dtype",
        "The device has no peak FLOP/s for a dtype of precision.params or precision.families.",
        "The device's matrix units do not support that dtype, so its time cannot be modelled.",
        "Use a dtype that the device supports, or give the peak of an emulation under device.peak_flops.",
        "device: {name: a100-80gb}\nprecision: {params: fp8}      # wrong\nprecision: {params: bf16}     # right",
    ),
    "MP507": CodeInfo(
        "the device has no tensor cores for a low-precision recipe",
        "precision.recipe names a way to scale operands that the device's generation does not multiply.",
        "MXFP8 and NVFP4 need Blackwell, FP8 with blocks of 128 Hopper or Blackwell, any FP8 Ada or later. Emulation gains no time.",
        "Use a recipe of the device, or another device.",
        "device: {name: h200}\nprecision: {recipe: {name: mxfp8}}      # wrong\nprecision: {recipe: {name: fp8_current}}      # right",
    ),
    "MP508": CodeInfo(
        "a width does not divide by the block of a scale",
        "Linears of this width cannot be scaled in whole blocks by precision.recipe.",
        "Tensor cores multiply runs of 16 elements in 8 or 4 bits, and mxfp8 has one scale for 32.",
        "Use a multiple of the block, or keep the layers in 16 bits.",
        "mlp: {ffn_hidden_size: 1000}\nprecision: {recipe: {name: mxfp8}}      # 1000 % 32 = 8\nmlp: {ffn_hidden_size: 1024}",
    ),
}
