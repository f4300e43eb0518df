"""MP6xx. megarun: what the runtime refuses, data files, checkpoints."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

RUNTIME: dict[str, CodeInfo] = {
    "MP601": CodeInfo(
        "the number of processes is not the plan's world size",
        "torchrun started another number of processes than pp · dp_replicate · dp_shard · cp · tp.",
        "Every rank of the plan is one process; a missing one would leave its layers or shards without an owner.",
        "Start as many processes as the mesh has ranks, or plan for another mesh.",
        "mesh: {pp: 2}\nmegarun train plan.json …                                        # wrong: one process\n"
        "torchrun --standalone --nproc-per-node 2 -m megarun train plan.json …    # right",
    ),
    "MP602": CodeInfo(
        "gradients would not accumulate in precision.grads",
        "FSDP2 keeps a gradient shard in the resident parameter's dtype; under a pipeline it sums microbatches in the reduction's dtype.",
        "Gradients summed in another dtype than the plan says are other numbers, and other bytes.",
        "Give precision.grads the value of precision.master, and with pp > 1 precision.reduce too.",
        "precision: {grads: bf16, master: fp32}      # wrong\nprecision: {grads: fp32, master: fp32}      # right",
    ),
    "MP603": CodeInfo(
        "the optimizer cannot keep these moments",
        "torch's AdamW keeps its moments in the dtype of the resident parameter.",
        "Moments of another dtype than the plan says are other bytes.",
        "Give precision.moments the value of precision.master.",
        "precision: {master: fp32, moments: bf16}      # wrong\nprecision: {master: fp32, moments: fp32}      # right",
    ),
    "MP604": CodeInfo(
        "more processes on this machine than devices",
        "A process's LOCAL_RANK names a GPU that this machine does not have.",
        "Two ranks on one device would each take the memory that the plan gives to one.",
        "Start at most one process per GPU on each machine, or hide the GPUs to train on CPU.",
        "torchrun --nproc-per-node 8 …      # wrong on a machine with 4 GPUs\nCUDA_VISIBLE_DEVICES= torchrun …   # CPU",
    ),
    "MP605": CodeInfo(
        "the token file does not fit the model",
        "The file holds token ids that the embedding has no row for.",
        "An id past the vocabulary reads memory that is not the embedding's.",
        "Tokenize with a vocabulary of at most model.vocab_size, or plan a model with a larger one.",
        "model: {vocab_size: 2048}\nmegarun data tokenize DIR -o FILE --vocab-size 2048",
    ),
    "MP606": CodeInfo(
        "torch's schedule does not execute the plan's order",
        "The installed torch runs the schedule's computations in another order than the plan's action lists.",
        "Memory and bubbles were planned for that order; in another one the number of microbatches in flight differs.",
        "Use a torch version that megarun supports (2.11 to 2.13).",
        "pp rank 1, position 0: the plan has 1F0, Schedule1F1B runs 1F1",
    ),
    "MP607": CodeInfo(
        "the loss or the gradient is not finite",
        "A step gave a loss or a gradient norm that is infinite or no number.",
        "An update with it would destroy the parameters; the step was not applied.",
        "Lower training.learning_rate (or muon_learning_rate), or train in a wider precision.params.",
        "training: {learning_rate: 3.0}      # wrong\ntraining: {learning_rate: 3.0e-4}   # right",
    ),
    "MP608": CodeInfo(
        "the output folder already holds a run",
        "The folder has a metrics.jsonl, or cannot be written.",
        "Metrics of two runs in one file cannot be told apart, and a run is never overwritten.",
        "Name another folder.",
        "megarun train plan.json --data FILE --out runs/first\nmegarun train plan.json --data FILE --out runs/second",
    ),
    "MP609": CodeInfo(
        "the device is out of memory",
        "torch's allocator could not get the bytes it was asked for.",
        "Either something else holds memory on the device, or the plan's estimate is too low, which is a defect.",
        "See what holds the device's memory; compare with the plan's estimate of this rank.",
        "megaplan estimate plan.json --rank 3",
    ),
    "MP610": CodeInfo(
        "megarun failed where it should not",
        "An exception that no command expects; on several ranks, the first that failed.",
        "This is a defect of megarun, or a machine that failed.",
        "Report it with the command, the plan and the traceback that `--traceback` prints.",
        "megarun train plan.json --data FILE --out DIR --traceback",
    ),
}
