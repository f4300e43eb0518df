"""A model of a checkpoint in one process, and the tokens with which it continues a text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaplan.plan.make import make_plan
from megaplan.spec.layout import Mesh, ScheduleSection, Sharding
from megaplan.spec.models import LatentAttention, Spec, SplitSection
from megarun.checkpoint.index import INDEX, read_index
from megarun.checkpoint.manifest import read_manifest
from megarun.dtypes import TORCH_DTYPES
from megarun.engine.build import build_stage
from megarun.errors import refusal
from megarun.huggingface.adapters import Adapters
from megarun.huggingface.convert import plan_of
from megarun.job.job import Job
from megarun.model.rotary import Rotary
from megarun.model.stage import Stage
from megarun.parallel.groups.context import WHOLE
from megarun.parallel.groups.continued import Continued
from megarun.remote import AnyPath


class Chooser(NamedTuple):
    """The way in which a token is chosen.

    Attributes:
        num_words: Tokens of the tokenizer: a model may have more rows.
        temperature: Divisor of the logits; 0 chooses the most probable token.
        top_p: The fewest tokens whose probabilities reach this sum are drawn from.
        generator: Source of random numbers.
    """

    num_words: int
    temperature: float
    top_p: float
    generator: torch.Generator

    def choose(self, logits: Tensor) -> int:
        """A token of these logits [V]."""
        logits = logits[: self.num_words]
        if self.temperature == 0:
            return int(logits.argmax())
        probs, order = (logits.double() / self.temperature).softmax(0).sort(descending=True)
        probs = probs * (probs.cumsum(0) - probs < self.top_p)
        return int(order[torch.multinomial(probs, 1, generator=self.generator)])


class Decoder:
    """A model that reads a text once and then one token at a time.

    Models whose layers depend on other positions in further ways (an indexer, experts with a capacity, experts that choose tokens) read the
    whole text again for each token.
    """

    def __init__(self, stage: Stage, spec: Spec) -> None:
        """Wrap a stage that has all layers; its rotary tables bound the length of a text."""
        self._stage, self._spec, self._tokens = stage, spec, list[int]()
        self._blocks = list(stage.layers.values())
        self.keeps = not _sees_otherwise(spec)
        self._continued = [Continued() for _ in self._blocks] if self.keeps else []
        for block, continued in zip(self._blocks, self._continued, strict=False):
            own: Any = replace(WHOLE, continued=continued)
            for module in block.modules():
                if hasattr(module, "cp"):
                    module.cp = own

    @property
    def vocab_size(self) -> int:
        """Number of the model's tokens."""
        return self._spec.model.vocab_size

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [V] after these further tokens: the whole text in the first call, then one token per call."""
        begin = len(self._tokens) if self.keeps else 0
        self._tokens += tokens
        for continued in self._continued:
            continued.begin()
        stage, device = self._stage, next(self._stage.parameters()).device
        ids = torch.tensor([self._tokens[begin:]], device=device)
        x = stage.embed(ids, self._before(begin, device), None, None)
        rotary = None if stage.rotary is None else _rows(stage.rotary, begin, len(self._tokens))
        x = stage.run_layers([x], rotary, None, {})
        found = stage.predict(x[:, -1:], None, (), ((), (), ()), rotary, None)
        if not isinstance(found, Tensor):
            raise RuntimeError("without labels a stage returns logits")
        return found[0, -1]

    def _before(self, begin: int, device: torch.device) -> Tensor | None:
        """Earlier tokens of each position, int64 [1, n − 1, t], for n-grams."""
        ngram = self._spec.model.features.ngram
        if ngram is None:
            return None
        rows = [
            [self._tokens[at - back] if at >= back else -1 for at in range(begin, len(self._tokens))] for back in range(1, ngram.max_order)
        ]
        return torch.tensor([rows], device=device)


def _sees_otherwise(spec: Spec) -> bool:
    moe, attention = spec.model.moe, spec.model.attention
    experts = moe is not None and (moe.capacity_factor is not None or moe.expert_choice)
    return experts or (isinstance(attention, LatentAttention) and attention.indexer is not None)


def _rows(rotary: Rotary, begin: int, end: int) -> Rotary:
    """The tables of these positions."""
    cut: Callable[[Tensor | None], Tensor | None] = lambda table: None if table is None else table[begin:end]  # noqa: E731
    return Rotary(rotary.cos[begin:end], rotary.sin[begin:end], cut(rotary.window_cos), cut(rotary.window_sin))


def load_decoder(checkpoint: AnyPath, length: int, device: torch.device) -> Decoder:
    """The model of a checkpoint, in the dtype in which its layers compute, adapters merged into their linears.

    Args:
        checkpoint: Folder of the checkpoint.
        length: Most tokens of a text.
        device: Device of the model.

    Raises:
        MegaplanError: The checkpoint cannot be read, or MP678, the model reads more than tokens.
    """
    saved = saved_job(checkpoint)
    needed = [name for name in ("structure", "platform", "relation_bias") if getattr(saved.spec.model.features, name) is not None]
    if needed:
        raise refusal("MP678", f"{checkpoint}: model.features.{needed[0]} needs a class for each token, which a prompt does not have")
    return Decoder(*load_stage(checkpoint, saved, length, device))


def saved_job(checkpoint: AnyPath) -> Job:
    """The job that saved a checkpoint; no tensor is read.

    Raises:
        MegaplanError: The checkpoint's manifest or plan cannot be read.
    """
    return Job.from_plan(plan_of(checkpoint, read_manifest(checkpoint)))


def load_stage(checkpoint: AnyPath, saved: Job, length: int, device: torch.device) -> tuple[Stage, Spec]:
    """The whole model of a checkpoint as one stage for this process, and its spec.

    Args:
        checkpoint: Folder of the checkpoint.
        saved: The job that saved it.
        length: Tokens of a row.
        device: Device of the model.

    Raises:
        MegaplanError: The checkpoint cannot be read.
    """
    job = Job.from_plan(make_plan(alone(saved, length)))
    (slot,) = job.layout.slots
    stage = build_stage(job.spec, job.inventory, slot).to(TORCH_DTYPES[saved.spec.precision.params.of_products])
    stage.to_empty(device=device)
    adapters = Adapters.of(checkpoint, saved, read_index(checkpoint, read_manifest(checkpoint).files.get(INDEX)))
    own = stage.state_dict()
    with torch.no_grad():
        for name, tensor in adapters.tensors(own):
            own[name].copy_(tensor.reshape(own[name].shape))  # a bank's rows
    stage.add_buffers(device)
    return stage.eval().requires_grad_(False), job.spec


def alone(job: Job, length: int) -> Spec:
    """The job's model in one process, for texts of a length."""
    spec = job.spec
    letters = "".join(block.family for block in job.inventory.layers)
    changed: dict[str, Any] = {
        "mesh": Mesh(),
        "schedule": ScheduleSection(),
        "sharding": Sharding(),
        "split": SplitSection(mode="equal"),
        "lora": None,
    }
    changed["model"] = spec.model.model_copy(update={"pattern": letters})  # without bars between stages
    changed["batch"] = spec.batch.model_copy(update={"micro_batch_size": 1, "seq_length": length})
    changed["precision"] = spec.precision.model_copy(update={"recipe": None})
    return spec.model_copy(update=changed)


def continuation(decoder: Decoder, prompt: Sequence[int], count: int, chooser: Chooser, end: int | None) -> Iterator[int]:
    """At most `count` tokens after a prompt, until `end` is chosen."""
    given = list(prompt)
    for _ in range(count):
        token = chooser.choose(decoder.logits(given))
        if token == end:
            return
        yield token
        given = [token]
