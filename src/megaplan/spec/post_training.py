"""The section `post_training`: reinforcement learning of the spec's model, for `megaplan rl`; outside the plan's digest."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from megaplan.dtypes import DType
from megaplan.scalars import Degree, NaturalInt, OptionsSection, ParamType, PositiveInt, StrictBool
from megaplan.spec.host import DeviceRef
from megaplan.spec.run import Seconds, quantity, written
from megaplan.units import parse_bytes, parse_count

Count = Annotated[int, quantity(parse_count), Field(gt=0, le=10**15, strict=True), written("integer", "parameters", "8B")]
Size = Annotated[int, quantity(parse_bytes), Field(gt=0, le=2**60, strict=True), written("integer", "B", "512MiB")]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
Tokens = Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False, strict=True)]
EngineName = Literal["vllm", "sglang"]
Placement = Literal["colocated", "split"]
SleepLevel = Annotated[int, Field(ge=0, le=2, strict=True)]
OffloadedPart = Literal["parameters", "gradients", "optimizer", "reference", "reward", "critic"]


class ResponseLengths(OptionsSection):
    """Tokens of responses as a distribution; a single number is the mean.

    Attributes:
        mean: Mean tokens, truncated responses included.
        p50: Tokens that half of the responses do not exceed.
        p90: Tokens that nine of ten responses do not exceed.
        p99: Tokens that 99 of 100 responses do not exceed.
        max: Limit at which a response is cut; null for batch.seq_length less the prompt.
    """

    options: ClassVar[frozenset[str]] = frozenset({"mean", "p50", "p90", "p99", "max"})

    mean: Tokens | None = None
    p50: Tokens | None = None
    p90: Tokens | None = None
    p99: Tokens | None = None
    max: PositiveInt | None = None


def _mean(value: Any) -> Any:
    return {"mean": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class Rollout(OptionsSection):
    """Generation by an inference engine.

    Attributes:
        engine: vllm or sglang, whose figures `megaplan rl --figures` lists.
        prompt: Mean tokens of a prompt.
        response: Tokens of responses.
        tp: Ranks of a tensor group.
        pp: Stages.
        ep: Ranks over which experts are distributed; null for tp.
        gpus: GPUs of the rollout pool; null for all GPUs if colocated, for the number of training GPUs if split.
        memory_fraction: Fraction of a device's memory that the engine takes; null for the engine's default.
        max_sequences: Sequences that a tensor group generates at a time; null for the engine's default.
        batched_tokens: Tokens of the engine's largest forward; null for the engine's default.
        dtype: Dtype of the engine's parameters; null for precision.params.
        kv_dtype: Dtype of the key-value cache.
        block_size: Tokens of a page; null for the engine's default.
        graphs: Decoding runs in captured graphs.
        prefix_cache: Responses to one prompt share its pages and its prefill; null for the engine's default.
        sleep: Engine between rollouts: 0 stays in memory, 1 copies its parameters to the host, 2 drops them; null for 2, of split pools 0.
        device: Device of a split pool; null for the training device.
    """

    options: ClassVar[frozenset[str]] = frozenset({
        "tp", "pp", "ep", "gpus", "memory_fraction", "max_sequences", "batched_tokens", "dtype", "kv_dtype", "block_size", "graphs",
        "prefix_cache", "sleep", "device",
    })  # fmt: skip

    engine: EngineName = "vllm"
    prompt: Tokens
    response: Annotated[ResponseLengths, BeforeValidator(_mean)]
    tp: Degree = 1
    pp: Degree = 1
    ep: Degree | None = None
    gpus: Degree | None = None
    memory_fraction: Fraction | None = None
    max_sequences: PositiveInt | None = None
    batched_tokens: PositiveInt | None = None
    dtype: ParamType | None = None
    kv_dtype: ParamType = DType.BF16
    block_size: PositiveInt | None = None
    graphs: StrictBool = True
    prefix_cache: StrictBool | None = None
    sleep: SleepLevel | None = None
    device: DeviceRef | None = None


class Policy(OptionsSection):
    """The trained model: the spec's.

    Attributes:
        updates: Optimizer steps of an iteration, each on its part of the responses.
        log_probs: Log-probabilities of the responses are computed again before the first update.
        packing: Sequences are packed into rows of batch.seq_length; without it each is a row, padded to batch.seq_length.
        log_prob_tokens: Tokens of a forward without gradients; null for batch.micro_batch_size rows.
        logits: Logits of a forward without gradients: full in fp32, or in chunks of 1,024 tokens.
    """

    options: ClassVar[frozenset[str]] = frozenset({"updates", "log_probs", "packing", "log_prob_tokens", "logits"})

    updates: PositiveInt = 1
    log_probs: StrictBool = True
    packing: StrictBool = True
    log_prob_tokens: PositiveInt | None = None
    logits: Literal["whole", "chunks"] = "whole"


class FrozenModel(OptionsSection):
    """A model without gradients: the reference, or a reward model.

    Attributes:
        parameters: Parameters; null for the policy's.
        seconds: Known time of the phase, such as of sandboxes or a remote judge; null for the model's forward.
    """

    options: ClassVar[frozenset[str]] = frozenset({"parameters", "seconds"})

    parameters: Count | None = None
    seconds: Seconds | None = None


class Critic(OptionsSection):
    """A value model that is trained as the policy is.

    Attributes:
        parameters: Parameters; null for the policy's.
    """

    options: ClassVar[frozenset[str]] = frozenset({"parameters"})

    parameters: Count | None = None


class Sync(OptionsSection):
    """Transfer of updated parameters to the engine.

    Attributes:
        how: ipc: gathered buckets are read on the same devices; broadcast: over NCCL; p2p: each engine rank's part alone; disk.
        bucket_bytes: Bytes that are gathered and sent at a time.
        staged: The engine's cache is allocated after the parameters have arrived and the trainer's state is away.
        merged: True: adapters are merged and the full model is sent; false: only adapters are sent.
    """

    options: ClassVar[frozenset[str]] = frozenset({"how", "bucket_bytes", "staged", "merged"})

    how: Literal["ipc", "broadcast", "p2p", "disk"] | None = None
    bucket_bytes: Size = 2**29
    staged: StrictBool = True
    merged: StrictBool = False


class PostTraining(OptionsSection):
    """Reinforcement learning with generated responses.

    Attributes:
        kind: rl.
        prompts: Prompts of an iteration.
        samples: Responses to each prompt.
        rollout: Generation.
        policy: The trained model.
        reference: Frozen copy for the KL term; null for none. With lora it is the model without adapters.
        reward: Reward model, or the time of rewards; null for rules that take no time.
        critic: Value model; null for none, as in GRPO.
        placement: colocated shares the devices of training; split has its own rollout pool.
        staleness: Iterations by which responses may be older than the policy; above 0 split pools work at the same time.
        sync: Transfer of parameters to the engine.
        offload: Parts of the trainer in host memory during the rollout; reference, reward and critic whenever they do not run.
        pinned: The host's copies of the policy's parameters are page-locked tensor by tensor, each rounded up to a power of two by torch.
        host_memory: Bytes of a node's memory; null for no check.
    """

    options: ClassVar[frozenset[str]] = frozenset({
        "policy", "reference", "reward", "critic", "placement", "staleness", "sync", "offload", "pinned", "host_memory",
    })  # fmt: skip

    kind: Literal["rl"]
    prompts: PositiveInt
    samples: PositiveInt
    rollout: Rollout
    policy: Policy = Policy.plain()
    reference: FrozenModel | None = None
    reward: FrozenModel | None = None
    critic: Critic | None = None
    placement: Placement = "colocated"
    staleness: NaturalInt = 0
    sync: Sync = Sync.plain()
    offload: tuple[OffloadedPart, ...] = ()
    pinned: StrictBool = False
    host_memory: Size | None = None
