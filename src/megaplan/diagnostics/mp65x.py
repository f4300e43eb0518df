"""MP650 to MP699: the processes of a job, what they share, and storages."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

JOBS: dict[str, CodeInfo] = {
    "MP650": CodeInfo(
        "a process did not join the job",
        "Not every process of the job started, or some cannot reach the rendezvous address.",
        "The others would block in their first collective until it times out after minutes.",
        "Start every rank, with the same MASTER_ADDR and MASTER_PORT; a slow start may need a longer --start-timeout.",
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr HOST -m megarun train …   # on the second machine, too",
    ),
    "MP651": CodeInfo(
        "the rendezvous address cannot be used",
        "Rank 0 cannot listen at MASTER_ADDR and MASTER_PORT, where the other ranks connect.",
        "Another program owns the port, possibly an earlier run that is still active, or the address is not this machine's.",
        "Give every process another MASTER_PORT, or start them with torchrun, which finds a free one on one machine.",
        "torchrun --standalone --nproc-per-node 4 -m megarun train …",
    ),
    "MP652": CodeInfo(
        "an environment variable of the launch is missing",
        "WORLD_SIZE is above 1; RANK, MASTER_ADDR and MASTER_PORT must then be set, too.",
        "Without them the rank of this process and the rendezvous address are unknown.",
        "Start with torchrun, which sets them all, or set them all; for one process unset WORLD_SIZE.",
        "torchrun --standalone --nproc-per-node 4 -m megarun train …",
    ),
    "MP653": CodeInfo(
        "the checkpoint was trained on other data",
        "The token files of --data, their order or their weights differ from those that the checkpoint records; files are identified by "
        "the SHA-256 of the payload in their headers, not by name.",
        "The step is a position in the data: with other files rows would be repeated or skipped.",
        "Give the checkpoint's data, use --other-data if the change is intended, or load only the parameters with --weights-only.",
        "megarun train plan.json --data NEW --out DIR --other-data",
    ),
    "MP654": CodeInfo(
        "the folder has checkpoints that are not ancestors of this run",
        "The run starts before the newest checkpoint, or from step 0: later checkpoints belong to another line. It starts a new line.",
        "Counted as this run's, they would displace its new checkpoints under --keep, and --resume auto would continue them.",
        "No action is needed: --keep ignores them, and --resume auto follows the newest line after its first save. Remove them by hand.",
        "megarun checkpoint list runs/my",
    ),
    "MP655": CodeInfo(
        "the checkpoint does not record its data",
        "An older megarun wrote it, before checkpoints recorded the identity of their data.",
        "--data cannot be compared with it; the next checkpoint records its data.",
        "Check that --data is what the run was started with.",
        "megarun data inspect corpus.tokens",
    ),
    "MP656": CodeInfo(
        "the ranks of the job have different settings",
        "Plan, seed, options and data are compared before the model is built; those named differ.",
        "Ranks with different settings would silently train another model, or deadlock in mismatched collectives.",
        "Start every rank with the same command, and with the same plan and token files on every node.",
        "sha256sum plan.json    # on every node",
    ),
    "MP657": CodeInfo(
        "an old checkpoint could not be removed",
        "The new checkpoint is complete, and the folder of one that --keep no longer counts could not be removed.",
        "It keeps its disk space; the run continues.",
        "Check the permissions of the folder, and remove the old checkpoint by hand.",
        "megarun checkpoint list runs/my",
    ),
    "MP658": CodeInfo(
        "another job uses the output folder",
        "The folder's run.lock belongs to a process that runs, or that has touched it within the last half minute.",
        "Two jobs in one folder would mix their metrics and remove each other's checkpoints.",
        "Wait for the other job or stop it, or name another folder. The lock of a job that was killed is taken over by itself.",
        "cat runs/my/run.lock    # its host and process",
    ),
    "MP659": CodeInfo(
        "the ranks do not see one output folder",
        "Rank 0 wrote run.lock into --out, and the ranks named do not find it in theirs.",
        "Every rank writes its part of a checkpoint: in several folders none would be complete.",
        "Give every rank the same folder on a file system that all nodes share.",
        "ls -l /shared/runs/my    # on every node",
    ),
    "MP660": CodeInfo(
        "a rank of the job is stuck",
        "It has been in one place of a step for longer than --step-timeout, or --first-step-timeout; its last operation is shown.",
        "The other ranks wait for it, and would until their collectives time out.",
        "Look at the process and node named: a file system that hangs, a stopped process, a failed GPU. For long steps raise the limit.",
        "megarun train plan.json --data FILE --out DIR --step-timeout 900",
    ),
    "MP661": CodeInfo(
        "the metrics cannot be written",
        "Writing a line of metrics.jsonl failed: the disk is full, or the folder's file system has failed.",
        "Steps without metrics could not be examined, and the next checkpoint would fail in the same way.",
        "Free disk space; the run resumes from its last checkpoint, and the incomplete line is removed.",
        "df -h runs/my",
    ),
    "MP662": CodeInfo(
        "no job script can be written",
        "The plan's ranks do not fill whole machines, or an option is missing or has characters that a script cannot hold.",
        "The job would fail after it has waited in the queue.",
        "Plan for whole machines of device.per_node GPUs, and give the options of `megarun train` after --.",
        "megarun launch slurm plan.json --time 24:00:00 -- --data corpus.tokens --out /shared/runs/my",
    ),
    "MP663": CodeInfo(
        "the weights of a Hugging Face model cannot be read",
        "A file is missing or damaged, or its tensors are not those of the plan: another name, another shape, another dtype.",
        "A tensor that is not read would keep initial values, and no later error would say so.",
        "Give the folder of the whole model, with safetensors and the config.json that the plan was made of.",
        "hf download meta-llama/Llama-3.2-1B --local-dir llama-3.2-1b",
    ),
    "MP664": CodeInfo(
        "the plan and the Hugging Face config are of two models, or of one whose tensors have no names here",
        "What decides the model's function differs between the plan and config.json, or no table of names is written for its model_type.",
        "Weights in another architecture give other outputs, even where every shape fits.",
        "Make the plan of this config.json.",
        "megaplan split llama-3.2-1b/config.json -o plan.json",
    ),
    "MP665": CodeInfo(
        "a storage cannot be used like this",
        "The URL names no storage that fsspec knows, or one whose package is not installed, or it has credentials; or --out is a URL.",
        "Steps would be trained that no checkpoint keeps.",
        "Install the extra `s3`, set credentials as for the storage's own tools, and give a local --out in addition to --checkpoint-url.",
        "megarun train plan.json --data FILE --out runs/my --checkpoint-url s3://bucket/my --save-every 100",
    ),
    "MP666": CodeInfo(
        "the storage of checkpoints fails",
        "An operation failed in every attempt: the storage cannot be reached, answers with errors, or refuses access.",
        "What it has is unknown: a run that took this for `no checkpoint` would begin again at step 0.",
        "Check address, credentials and bucket with the storage's own tools; the same command resumes from the last checkpoint.",
        "aws s3 ls s3://bucket/my/checkpoints/",
    ),
    "MP667": CodeInfo(
        "the plans of --plans do not belong to one run, or none is small enough",
        "A plan has another model, global batch or `training` part than PLAN, or all have more ranks than there are processes.",
        "A job that lost a node could not continue from its checkpoint, or would train on other batches.",
        "Split the same spec for fewer GPUs with the same global batch: fewer data ranks, more microbatches.",
        "megaplan split SPEC --set mesh.dp_shard=4 --set schedule.num_microbatches=16 -o plans/half.json",
    ),
    "MP668": CodeInfo(
        "another rank of the job has ended",
        "A connection to another process of the job was closed, and that process has reported no error.",
        "It was killed (by the kernel for lack of memory, a scheduler or a person), it crashed, or its machine was lost. Nothing up to the "
        "last whole checkpoint is lost.",
        "Look for the cause on the machine of the rank that is named (dmesg, the scheduler's log); the same command resumes.",
        "torchrun --nproc-per-node 8 -m megarun train plan.json --data FILE --out DIR --save-every 100",
    ),
    "MP669": CodeInfo(
        "the kernels of a plan cannot be compiled",
        "Triton is not installed, the plan runs plain torch, its device is not of NVIDIA, the cache cannot be written, or its step cannot "
        "be run on fake tensors here.",
        "The first step would compile each kernel when it is first launched.",
        "Compile with the versions of the machine that trains, a plan with `host.kernels: triton`, and a folder that can be written.",
        "megarun compile plan.json --cache kernels",
    ),
}
