"""One pipeline stage: the blocks of a slot, in order."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as linear_op

from megaplan.families.registry import FAMILIES
from megaplan.hosts.megarun.ledger import taken_values
from megaplan.inventory.tensors import Inventory, fsdp_units
from megaplan.layout.ranks import Slot
from megaplan.spec import models as spec
from megaplan.spec.local import boundary, local_dims
from megarun.model.attention_residuals import DepthAttention
from megarun.model.blocks import build_block, build_depth, build_relation_bias, build_sides
from megarun.model.cap import capped
from megarun.model.indexer import index_loss_factor
from megarun.model.moe import ExpertBlock
from megarun.model.mtp import Ends
from megarun.model.norm import center_norms, linear, stream_norm
from megarun.model.payload import Values, carried, pack_values, unpack_values, values_of
from megarun.model.rotary import Rotary, rotary_table, rotary_width, window_rotary_width
from megarun.model.router_losses import loss_factors
from megarun.model.streams import StreamConnections
from megarun.model.vision import build_images, merged
from megarun.parallel.groups.adapters import start_gradients
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.delayed import DelayedNumbers
from megarun.parallel.groups.expert import LOCAL, ExpertParallel
from megarun.parallel.groups.scaled import Scaling, multiply
from megarun.parallel.groups.tensor import ALONE, TensorParallel, column_parallel
from megarun.parallel.groups.tensor_vocabulary import SlicedEmbedding, summed_cross_entropy, summed_linear_cross_entropy


def final_norm(model: spec.Model) -> nn.Module:
    """The norm before the head, which is linear and has the logits' factor; with several streams, or earlier values, also their reader."""
    norm = stream_norm(model.norm, model.hidden_size, model.norm_eps)
    norm.factor = model.logits_multiplier
    if model.streams is not None:
        norm.streams = StreamConnections(model.streams, model.hidden_size, model.norm_eps, last=True)
    if model.attention_residuals is not None:
        norm.depth = DepthAttention(model.hidden_size, model.norm_eps)
    return norm


class Stage(nn.Module):
    """The modules of one slot, named as the inventory names them: `embedding`, `layers.{global index}`, `final_norm`, `head`.

    The first stage takes token ids [B, t] and the others the residual stream [B, t, h]; the last returns logits [B, t, V] and the others
    the residual stream; t is the number of local tokens. Hyper-connections have n streams side by side, [B, t, n · h]. Attention residuals
    have all values that later layers read one after another, [n · B, t, h]. With `vocab_parallel` ids are of all tokens, [B, T], and logits
    are [B, T, V / tp], of all tokens for the local vocabulary. A tied head reads `embedding`; on the last of several stages that is a
    second copy, as for the depths of multi-token prediction, `mtp.{depth}`, whose loss the last stage returns with the logits. With
    `host.kernels: triton` head and loss are one operation, and with labels the last stage returns its summed loss, including multi-token
    prediction, for logits.
    """

    rope_cos: Tensor
    rope_sin: Tensor
    window_rope_cos: Tensor
    window_rope_sin: Tensor
    further_loss: Tensor

    def __init__(
        self,
        config: spec.Spec,
        inventory: Inventory,
        slot: Slot,
        tp: TensorParallel = ALONE,
        ep: ExpertParallel = LOCAL,
        cp: ContextParallel = WHOLE,
    ) -> None:
        super().__init__()
        model = config.model
        self.tp, self.cp, self.slices_words = tp, cp, config.mesh.vocab_parallel and tp.degree > 1
        num_words = tp.share(model.vocab_size) if self.slices_words else model.vocab_size
        self.index, self.embeds, self.frozen = slot.index, slot.index % config.mesh.num_slots == 0, config.lora is not None
        self.predicts = "final_norm" in slot.blocks
        self.joins_loss = model.joins_loss(kernels=config.host.uses_triton)
        self.head_scaling: Scaling | None = None  # of the recipe
        self.delayed: DelayedNumbers | None = None  # of the recipe
        self.packed_maxima: Tensor
        self.num_packed = 0  # the largest magnitudes of the weights, which packing needs
        self.vision, self.projector = build_images(config, slot.blocks, tp)
        self.cuts_streams = config.mesh.cuts_streams
        if "embedding" in slot.blocks:
            sliced = self.slices_words
            self.embedding = SlicedEmbedding(num_words, model.hidden_size, tp) if sliced else nn.Embedding(num_words, model.hidden_size)
            if model.embedding_norm:
                self.embedding.norm = stream_norm(model.norm, model.hidden_size, model.norm_eps)
        self.ngram, self.structure, self.platform = build_sides(model, slot.blocks)
        self.relation_bias = build_relation_bias(model, tp) if "relation_bias" in slot.blocks else None
        layers = [int(name.removeprefix("layers.")) for name in slot.blocks if name.startswith("layers.")]
        families, factors, index = inventory.layers, loss_factors(config), index_loss_factor(config)
        self.layers = nn.ModuleDict({str(i): build_block(config, families[i].family, i, tp, ep, cp, factors, index) for i in layers})
        if self.predicts:
            self.final_norm = final_norm(model)
        self.num_streams, self.reads_depth = model.num_streams, model.attention_residuals is not None
        self.span = slot.start, slot.stop
        self._place_values(config, layers)
        if "head" in slot.blocks:
            self.head = linear(model.hidden_size, num_words)
        mtp = model.features.mtp if self.predicts else None
        self.looks_ahead = mtp is not None
        if mtp is not None:
            block = replace(tp, may_wait=False)  # weight gradients outside the layers are never deferred
            alone = replace(ep, passes_turns=False)  # the ledger has no entries for the exchanges of a prediction depth
            self.mtp = nn.ModuleDict({str(depth): build_depth(config, depth, block, alone, cp, factors) for depth in range(mtp.depth)})
            self.further_factor = mtp.loss_weight / mtp.depth
            self.adds_sides_ahead, self.reads_normed_ahead = mtp.side_embeddings, mtp.normed_input
        ahead = mtp.letters if mtp is not None else ""
        attends = any(FAMILIES[letter].rotary is not None for letter in (*ahead, *(families[index].family for index in layers)))
        self.attention = model.attention if attends else None
        self.seq_length = config.batch.seq_length
        self.multiplier, self.logits_cap, self.norms_words = model.embedding_multiplier, model.logits_cap, model.embedding_norm
        if model.zero_centered_norm:
            center_norms(self)

    def _place_values(self, config: spec.Spec, layers: Sequence[int]) -> None:
        """Note the values of each layer, the layers that keep an earlier one's, and the stage's boundaries."""
        (start, stop), dims, payload = self.span, local_dims(config), config.model.payload
        self.values_of = {str(layer): values_of(payload, layer) for layer in layers}
        self.received, self.sent = boundary(config, dims, start), boundary(config, dims, stop)
        self.taking = frozenset(layer for layer in layers if taken_values(config, layer, start))

    def add_rotary(self, device: torch.device) -> None:
        """Create the rotary tables on `device` if the stage has attention: fp32 buffers, not in checkpoints; an encoder's first."""
        if self.vision is not None:
            self.vision.add_rotary(device)
        if self.attention is not None:
            width, theta, scaling = rotary_width(self.attention), self.attention.rope_theta, self.attention.rope_scaling
            self.add_table("rope", width, theta, device, scaling)
            if self.window_theta is not None:
                self.add_table("window_rope", window_rotary_width(self.attention), self.window_theta, device, None)

    def add_table(self, name: str, width: int, theta: float, device: torch.device, scaling: spec.RopeScaling | None) -> None:
        """Create the buffers `name`_cos and `name`_sin."""
        table = rotary_table(self.cp.positions(self.seq_length), width, theta, device, scaling)  # which drops the positions
        self.register_buffer(f"{name}_cos", table.cos, persistent=False)
        self.register_buffer(f"{name}_sin", table.sin, persistent=False)

    @property
    def window_theta(self) -> float | None:
        """Base of the rotary angles of layers with a window; None for that of all layers."""
        return self.attention.window_rope_theta if isinstance(self.attention, spec.GroupedQueryAttention) else None

    @property
    def rotary(self) -> Rotary | None:
        """The tables; None without attention."""
        if self.attention is None:
            return None
        if self.window_theta is None:
            return Rotary(self.rope_cos, self.rope_sin)
        return Rotary(self.rope_cos, self.rope_sin, self.window_rope_cos, self.window_rope_sin)

    def units(self, unit_layers: int) -> list[list[nn.Module]]:
        """The modules of every unit of FSDP2 in the order they run: so many layers, then each depth of multi-token prediction."""
        depths = [f"mtp.{depth}" for depth in self.mtp] if self.looks_ahead else []
        names = [*(f"layers.{layer}" for layer in self.layers), *depths]
        return [[self.get_submodule(name) for name in unit] for unit in fsdp_units(names, unit_layers)]

    def add_buffers(self, device: torch.device) -> None:
        """Create the buffers that are not parameters' state: rotary tables, sums of a step, numbers of delayed scaling."""
        if self.looks_ahead:
            self.register_buffer("further_loss", torch.zeros((), dtype=torch.float64, device=device), persistent=False)
        if self.num_packed:
            self.register_buffer("packed_maxima", torch.zeros(self.num_packed, device=device), persistent=False)
        if self.delayed is not None:
            for name, numbers in zip(("delayed_numbers", "delayed_history"), self.delayed.create(device), strict=True):
                self.register_buffer(name, numbers, persistent=False)
        if self.relation_bias is not None:
            self.relation_bias.add_gradient_parts(device)
        for module in self.modules():
            if isinstance(module, ExpertBlock):
                module.add_sums(device)
        self.add_rotary(device)  # last, so that its scratch adds to all other buffers

    def forward(
        self,
        x: Tensor,
        starts: Tensor | None = None,
        before: Tensor | None = None,
        structure: Tensor | None = None,
        platform: Tensor | None = None,
        labels: Tensor | None = None,
        following: Sequence[Tensor] = (),
        following_before: Sequence[Tensor] = (),
        following_structure: Sequence[Tensor] = (),
        following_platform: Sequence[Tensor] = (),
        classes: Tensor | None = None,
        patches: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Token ids or residual stream in; residual stream, logits or summed loss out, with `following` also the loss of further tokens.

        Args:
            x: Token ids or residual stream.
            starts: int32 [B, T], the first position of each position's document for packed rows; None for one document per row. Under CP
                the result of `ContextParallel.own_starts`.
            before: int64 [B, n − 1, t], the tokens 1, 2, … positions before local ones, -1 for none; for stages with n-grams.
            structure: uint8 [B, t], classes of local tokens; for stages that embed them.
            platform: uint8 [B, t], platforms of local tokens; for stages that embed them.
            labels: int64, the next token of each row of `logits`, -100 for none; for stages that compute their loss or predict further
                tokens.
            following: Labels of each depth, shaped like `labels`: the tokens 2, 3, … positions after.
            following_before: If depths add n-grams, `before` of the tokens that each of them embeds.
            following_structure: If depths add classes, `structure` of these tokens.
            following_platform: If depths add platforms, `platform` of these tokens.
            classes: uint8 [B, T], classes of all positions; for stages with a relation bias.
            patches: Values of the rank's patches of all images [images, patches, values]; for stages with an encoder.
            places: int64, where each row of the projection goes in the stream [B · t], or B · t for another rank's; with `patches`.
        """
        if self.embeds:
            x = self.embed(x, before, structure, platform, patches=patches, places=places)
            x = start_gradients(x) if self.frozen else x
        shared = rotary = self.rotary
        if self.relation_bias is not None and rotary is not None:
            if classes is None:
                raise ValueError("a relation bias needs classes; megarun.training.prepare should refuse a file without")
            x, relations = self.relation_bias(x, classes)
            shared = rotary._replace(relations=relations)
        values: Values = {}
        if self.received.values and not self.embeds:
            x, values = unpack_values(x, self.received)
        stream = [x]
        del x  # a local name would keep the stream alive although the first block does not save it
        x = self.run_layers(stream, shared, starts, values)
        if not self.predicts:
            return pack_values(x, [values[key] for key in carried(self.sent)], self.sent) if values else x
        return self.predict(x, labels, following, (following_before, following_structure, following_platform), rotary, starts)

    def run_layers(self, stream: list[Tensor], shared: Rotary | None, starts: Tensor | None, values: Values) -> Tensor:
        """The stream, in a list that is emptied -> the last layer's output, or the last norm's input.

        Args:
            stream: The residual stream.
            shared: Values that attention layers share.
            starts: Document starts of packed rows.
            values: Values of earlier layers; on return the values that later layers read.
        """
        x = stream.pop()
        for layer, block in self.layers.items():  # only layers that read a value get it: recompute keeps every argument
            own = self.values_of[layer]
            given, inputs = tuple([values[key] for key in own.given]), [x] if own.inputs else []
            rotary = shared._replace(given=given) if shared is not None and given else shared
            x = block((x, *[values[key] for key in own.earlier]) if self.reads_depth else x, rotary, starts)
            made: tuple[Tensor, ...] = ()
            if own.made:
                x, made = x
            values.update(zip((*own.inputs, *own.made), (*inputs, *made), strict=True))
            for key in own.ended:
                del values[key]
            del given, inputs, rotary, made
        if self.reads_depth and self.predicts:
            x = self.final_norm.get_submodule("depth")((x, *values.values()))
        return x

    def predict(
        self,
        x: Tensor,
        labels: Tensor | None,
        following: Sequence[Tensor],
        sides: tuple[Sequence[Tensor], ...],
        rotary: Rotary | None,
        starts: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The last layer's stream [B, t, h] -> logits or summed loss, with `following` also the loss of further tokens."""
        further = normed = None
        if self.looks_ahead and labels is not None and torch.is_grad_enabled():
            if self.reads_normed_ahead:
                x = normed = self.final_norm(x)
            further = self.predict_further(x, (labels, *following), sides, rotary, starts)  # evaluations use only the main prediction
        x = self.final_norm.get_submodule("streams")(x) if self.num_streams > 1 else x
        normed = self.final_norm(x) if normed is None else normed
        if self.joins_loss and labels is not None:
            loss = self.loss_of(normed, labels)
            return loss if further is None else loss + further
        logits = self.logits(normed)
        return logits if further is None else (logits, further)

    def embed(self, tokens: Tensor, *sides: Tensor | None, patches: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """Token ids, earlier tokens, classes and platforms, images if any -> the residual stream of local tokens [B, t, h]."""
        rows = None
        if self.vision is not None and self.projector is not None and patches is not None:
            rows = self.projector(self.vision(patches))
        x: Tensor = self.embedding(tokens)
        x = x if self.multiplier == 1 else x * self.multiplier
        x = self.embedding.get_submodule("norm")(x) if self.norms_words else x
        if rows is not None and places is not None:
            x = merged(x, rows, places, spare=self.cuts_streams)
            del rows  # in the stream
        for side, ids in self.sides_of(tokens, *sides):
            x = side(x, *ids)
        return x if self.num_streams == 1 else x.repeat(1, 1, self.num_streams)

    def sides_of(
        self, tokens: Tensor, before: Tensor | None, structure: Tensor | None, platform: Tensor | None
    ) -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
        """The side embeddings that a stage adds to embedded tokens, each with its ids from the batch.

        The caller runs them, so no frame keeps the residual stream before the last of them.
        """
        found: list[tuple[nn.Module, tuple[Tensor, ...]]] = []
        if self.ngram is not None:
            if before is None:
                raise ValueError("the stage has n-grams, but the batch has no earlier tokens; Batches.at should have read them")
            length = before.shape[-1]
            found.append((self.ngram, (tokens[:, self.tp.index * length :][:, :length] if self.slices_words else tokens, before)))
        for embedding, ids in ((self.structure, structure), (self.platform, platform)):
            if embedding is not None:
                if ids is None:
                    raise ValueError(
                        "the stage embeds classes or platforms, but the batch has none; megarun.training.prepare should refuse such a file"
                    )
                found.append((embedding, (ids,)))
        return found

    def embed_ahead(self, tokens: Tensor, *, sides: tuple[Tensor | None, ...]) -> Tensor:
        """Embedding of the tokens that a depth reads, [B, t, h]; within the depth, whose storages these are."""
        x: Tensor = self.embedding.forward(tokens)
        for side, ids in self.sides_of(tokens, *sides) if self.adds_sides_ahead else ():
            x = side(x, *ids)
        return x

    def predict_further(
        self,
        x: Tensor,
        following: Sequence[Tensor],
        sides: tuple[Sequence[Tensor], ...],
        rotary: Rotary | None,
        starts: Tensor | None,
    ) -> Tensor:
        """The weighted sum of all depths' losses, fp32 scalar.

        Args:
            x: The residual stream, or the final norm's output [B, t, h].
            following: Tokens 1, 2, … positions after.
            sides: `following_before`, `following_structure` and `following_platform`.
            rotary: Rotary tables of the stage.
            starts: Document starts of packed rows.
        """
        total: Tensor | None = None
        for index, (depth, (tokens, targets)) in enumerate(zip(self.mtp.values(), pairwise(following), strict=True)):
            ahead = tuple(each[index] if each else None for each in sides)
            ends = Ends(partial(self.embed_ahead, sides=ahead), self.loss_of)
            x, one = depth(x, tokens, targets, ends, rotary, starts)
            total = one if total is None else total + one
        if total is None:
            raise ValueError("multi-token prediction needs at least one depth")
        loss = total * self.further_factor
        self.further_loss += loss.detach()
        return loss

    def loss_of(self, normed: Tensor, targets: Tensor) -> Tensor:
        """Local tokens [B, t, h] and their targets -> summed cross entropy; of all tokens with `vocab_parallel`."""
        slices = self.tp if self.slices_words else None
        if self.joins_loss:
            return summed_linear_cross_entropy(slices, normed, self.head_weight, targets, self.head_scaling)
        return summed_cross_entropy(slices, self.logits(normed), targets)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head or, if tied, of the embedding: [V, h], or [V / tp, h] for the local vocabulary."""
        weight: Tensor = (self.head if hasattr(self, "head") else self.embedding).weight
        return weight

    def logits(self, normed: Tensor) -> Tensor:
        """Local tokens [B, t, h] -> their logits [B, t, V], or logits of all tokens for the local vocabulary [B, T, V / tp]."""
        cap = self.logits_cap
        return self.whole_logits(normed) if cap is None else capped(self.whole_logits(normed), cap)

    def whole_logits(self, normed: Tensor) -> Tensor:
        """Logits without a cap."""
        if self.head_scaling is not None:
            return multiply(self.tp if self.slices_words else ALONE, [self.head_scaling], normed, [self.head_weight], [None])[0]
        if not self.slices_words:
            return linear_op(normed, self.head_weight)
        # a deferred weight gradient would keep the gradient of the logits alive
        return column_parallel(self.tp, normed, [self.head_weight], may_wait=False)[0]
