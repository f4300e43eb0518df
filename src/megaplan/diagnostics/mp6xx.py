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
        "Under a pipeline FSDP2 sums whole gradients of the microbatches in the reduction's dtype.",
        "Gradients summed in another dtype than the plan says are other numbers, and other bytes.",
        "With pp > 1, give precision.reduce the value of precision.grads.",
        "precision: {grads: fp32, reduce: bf16}      # wrong with pp > 1\nprecision: {grads: bf16, reduce: bf16}      # right",
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
    "MP611": CodeInfo(
        "the token file cannot be read",
        "No file has the given name, the name is a folder's, or the operating system refused to open it.",
        "Training reads its tokens from one file that `megarun data tokenize` wrote.",
        "Correct the path, or write the file first.",
        "megarun data tokenize DIR -o corpus.tokens\nmegarun train plan.json --data corpus.tokens --out DIR",
    ),
    "MP612": CodeInfo(
        "the file is not a token file",
        "The file is empty or does not begin with the eight bytes of a token file.",
        "Bytes of another format would be read as token ids.",
        "Make a token file from the folder of texts; other formats are not imported.",
        "megarun data inspect corpus.txt       # wrong\nmegarun data inspect corpus.tokens    # right",
    ),
    "MP613": CodeInfo(
        "the token file has a newer format",
        "The file was written by a later megarun, in a format version that this one does not know.",
        "Its layout may differ, and a guess would read other tokens.",
        "Update megarun, or write the file again with this version.",
        "megarun data tokenize DIR -o corpus.tokens",
    ),
    "MP614": CodeInfo(
        "the token file is damaged",
        "The file's length, header, document offsets, token ids or digest contradict one another: often an interrupted copy.",
        "A part of the corpus is missing or is not what was written.",
        "Copy the file again, or write it again: the same folder and options give the same bytes.",
        "megarun data tokenize DIR -o corpus.tokens\nmegarun data inspect corpus.tokens",
    ),
    "MP615": CodeInfo(
        "the token file gives no row of this length",
        "A row is seq_length tokens and one more, the last label; the file has fewer tokens, or seq_length is below 1.",
        "No batch could be filled without inventing tokens.",
        "Tokenize more text, or plan a shorter batch.seq_length.",
        "batch: {seq_length: 4096}      # needs at least 4,097 tokens",
    ),
    "MP616": CodeInfo(
        "the folder of texts cannot be read",
        "No folder has the given name, the name is a file's, or the operating system refused to list it.",
        "A corpus is a folder; every text file in it is one document.",
        "Correct the path; put a single text into a folder of its own.",
        "megarun data tokenize src/ -o corpus.tokens",
    ),
    "MP617": CodeInfo(
        "the folder has no text to tokenize",
        "Every file was left out, for the reasons that the detail counts.",
        "A token file without tokens cannot be trained on.",
        "Check the folder, --include and --limit-bytes; texts must be UTF-8.",
        "megarun data tokenize src/ -o corpus.tokens --include '*.h,*.hpp'",
    ),
    "MP618": CodeInfo(
        "the tokenizer cannot have this vocabulary size",
        "Byte-level BPE needs its 256 bytes and the end of document, and ids fit 32 bits; bytes have exactly 257 ids.",
        "A smaller vocabulary could not spell every text.",
        "Choose a size from 257 on; leave --vocab-size out with --tokenizer bytes.",
        "megarun data tokenize DIR -o corpus.tokens --vocab-size 2048",
    ),
    "MP619": CodeInfo(
        "the token file cannot be written",
        "The folder of the new file does not exist or cannot be written, the disk is full, or the name is that of a file of another kind.",
        "A file that is not a token file is never overwritten.",
        "Name a new file in a folder that exists.",
        "mkdir -p data\nmegarun data tokenize DIR -o data/corpus.tokens",
    ),
    "MP620": CodeInfo(
        "no such stage",
        "The stage is outside the pipeline.",
        "Stages are slots: they count in model order from 0 to pp · vpp − 1.",
        "Use a stage of the plan.",
        "megarun trace plan.json --stage 0",
    ),
}
