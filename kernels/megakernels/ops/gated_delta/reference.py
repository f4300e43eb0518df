"""The gated delta rule in plain torch, a chunk of positions at a time, with explicit backward formulas.

Per head, with unit keys k and queries q / √K, a decay vector α_t = exp(l_t) over the rows of the state S ∈ ℝ^{K×V}, and β_t:

    S_t = α_t ⊙ S_{t−1} + β_t k_t (v_t − (α_t ⊙ S_{t−1})ᵀ k_t)ᵀ,    y_t = S_tᵀ q_t.

Inside a chunk, with D_ij the decay from position j to i ≥ j and S the state before the chunk, the values that are written are X:

    (I + L) X = β (v − K S),   L_ij = β_i k_iᵀ D_ij k_j (j < i),   K_i = D_i0 k_i,
    y = Q S + A X,             A_ij = q_iᵀ D_ij k_j (j ≤ i),       Q_i = D_i0 q_i,
    S' = D_C0 ⊙ S + Eᵀ X,      E_j = D_Cj k_j.

Decays are products of their own terms: a quotient of two running products would overflow. Backward recomputes the states of a segment from
the one saved before it, so scratch is a segment's.

Letters: B sequences, H value heads, C positions of a chunk, K key width, V value width, W the width of a decay, 1 or K.

Source: arXiv:2412.06464, section 3.3; arXiv:2406.06484, section 3.2 (X as a triangular system); arXiv:2510.26692, section 3 (W = K).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megakernels._common import accumulator_dtype, row_blocks, span_sums, upcast
from megakernels.ops.gated_delta.inputs import GatedDeltaInputs

EPS = 1e-6
"""Added to the squared length of a query or key. Source: flash-linear-attention and transformers, `l2norm`."""


def forward(state: Tensor | None, given: GatedDeltaInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the scan from a state [B, H, K, V] in the accumulation dtype; None is zero.

    Returns:
        y [B, T, H, V] in q's dtype, the states before each segment [B, ceil(T / save_every), H, K, V], and the last state.
    """
    segments = list(row_blocks(given.q.shape[1], 1, given.save_every))
    now = _zero_state(given) if state is None else state
    y = torch.empty(given.v.shape, dtype=given.q.dtype, device=given.q.device)
    states = torch.empty(now.shape[0], len(segments), *now.shape[1:], dtype=now.dtype, device=now.device)
    for index, segment in enumerate(segments):
        states[:, index] = now
        for positions in _chunks(segment, given.chunk_size):
            chunk = _chunk(given, positions)
            written = chunk.written(now)
            y[:, positions] = (chunk.q * chunk.before @ now + chunk.scores(chunk.q) @ written).transpose(1, 2)
            now = chunk.after(now, written)
    return y, states, now


def backward(grad_last: Tensor | None, grad_y: Tensor, given: GatedDeltaInputs, states: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of q to dt_bias in order, and of the first state, from those of the last state (None is zero) and of y."""
    tokens = given.q, given.k, given.v, given.decay, given.beta
    found = [torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in tokens]
    grad_A_log, grad_dt_bias = (torch.zeros(like.shape, dtype=states.dtype, device=like.device) for like in (given.A_log, given.dt_bias))
    grad_state = torch.zeros_like(states[:, 0]) if grad_last is None else grad_last
    for index, segment in reversed(list(enumerate(row_blocks(given.q.shape[1], 1, given.save_every)))):
        now, walked = states[:, index], []
        for positions in _chunks(segment, given.chunk_size):
            walked.append((positions, now))
            chunk = _chunk(given, positions)
            now = chunk.after(now, chunk.written(now))
        for positions, before in reversed(walked):
            chunk = _chunk(given, positions)
            gradients, grad_state = _chunk_backward(chunk, before, upcast(grad_y[:, positions]).transpose(1, 2), grad_state)
            made, of_A_log, of_dt_bias = _as_given(chunk, gradients, given)
            for total, part in zip(found, made, strict=True):
                total[:, positions] = part
            grad_A_log += of_A_log
            grad_dt_bias += of_dt_bias
    return (*found, grad_A_log.to(given.A_log.dtype), grad_dt_bias.to(given.dt_bias.dtype)), grad_state


@dataclass(frozen=True, slots=True)
class _DeltaChunk:
    """One chunk's inputs and decays in the accumulation dtype."""

    q: Tensor  # [B, H, C, K], unit length over √K
    k: Tensor  # [B, H, C, K], unit length
    v: Tensor  # [B, H, C, V]
    beta: Tensor  # [B, H, C, 1]
    raw: Tensor  # [B, H, C, W], decay + dt_bias
    log_decay: Tensor  # [B, H, C, W]
    pair: Tensor  # [B, H, W, C, C], the decay from position j to i, 0 where j > i or in another document
    before: Tensor  # [B, H, C, W], the decay from the state before the chunk, 0 where a document started since
    lengths: tuple[Tensor, Tensor]  # inverse lengths of queries and keys before they are repeated, [B, Hk, C, 1]

    def scores(self, rows: Tensor) -> Tensor:
        """rows_iᵀ D_ij k_j, [B, H, C, C]."""
        if self.pair.shape[2] == 1:
            return (rows @ self.k.mT) * self.pair[:, :, 0]
        return torch.einsum("bhik,bhjk,bhkij->bhij", rows, self.k, self.pair)

    def over_keys(self, weights: Tensor, columns: Tensor) -> Tensor:
        """Σ_j weights_ij D_ij columns_j, [B, H, C, K]."""
        if self.pair.shape[2] == 1:
            return (weights * self.pair[:, :, 0]) @ columns
        return torch.einsum("bhij,bhjk,bhkij->bhik", weights, columns, self.pair)

    def over_queries(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Σ_i weights_ij D_ij rows_i, [B, H, C, K]."""
        if self.pair.shape[2] == 1:
            return (weights * self.pair[:, :, 0]).mT @ rows
        return torch.einsum("bhij,bhik,bhkij->bhjk", weights, rows, self.pair)

    def pair_gradients(self, scores: Tensor, products: Tensor) -> Tensor:
        """Gradients of the logarithms of D_ij, [B, H, W, C, C], from those of A and of kᵀ D k."""
        if self.pair.shape[2] == 1:
            return (scores * self.scores(self.q) + products * self.scores(self.k)).unsqueeze(2)
        rows = scores.unsqueeze(-1) * self.q.unsqueeze(3) + products.unsqueeze(-1) * self.k.unsqueeze(3)
        return (rows * self.k.unsqueeze(2)).movedim(-1, 2) * self.pair

    @property
    def to_end(self) -> Tensor:
        """The decay from each position to the last, [B, H, C, W]."""
        return self.pair[:, :, :, -1].transpose(2, 3)

    @property
    def carry(self) -> Tensor:
        """The decay of the state over the chunk, [B, H, W, 1]."""
        return self.before[:, :, -1].unsqueeze(-1)

    @property
    def system(self) -> Tensor:
        """L, [B, H, C, C]; its diagonal is not read."""
        return self.beta * self.scores(self.k)

    def written(self, state: Tensor) -> Tensor:
        """X, [B, H, C, V]."""
        right = self.beta * (self.v - self.k * self.before @ state)
        solved: Tensor = torch.linalg.solve_triangular(self.system, right, upper=False, unitriangular=True)
        return solved

    def after(self, state: Tensor, written: Tensor) -> Tensor:
        """The state after the chunk."""
        return self.carry * state + (self.k * self.to_end).mT @ written


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients of a chunk's q, k, v, β and log decay."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor


def _chunk_backward(chunk: _DeltaChunk, state: Tensor, grad_y: Tensor, grad_after: Tensor) -> tuple[_Gradients, Tensor]:
    """Gradients of the chunk's inputs and of the state before it, from those of y [B, H, C, V] and of the state after it."""
    q, k, beta = chunk.q, chunk.k, chunk.beta
    to_end, read = chunk.to_end, k * chunk.before
    unread = chunk.v - read @ state
    products, written = chunk.scores(k), chunk.written(state)
    grad_written = chunk.scores(q).mT @ grad_y + k * to_end @ grad_after
    grad_right = torch.linalg.solve_triangular((beta * products).mT, grad_written, upper=True, unitriangular=True)
    grad_system = -(grad_right @ written.mT).tril(-1)
    grad_products, grad_scores = beta * grad_system, grad_y @ written.mT
    grad_values = beta * grad_right
    grad_read, grad_asked, grad_ended = -grad_values @ state.mT, grad_y @ state.mT, written @ grad_after.mT

    from_q = chunk.over_keys(grad_scores, k)
    as_row, as_column = chunk.over_keys(grad_products, k), chunk.over_queries(grad_scores, q) + chunk.over_queries(grad_products, k)
    asked, came, ended = chunk.before * grad_asked, chunk.before * grad_read, to_end * grad_ended
    grad_state = (q * chunk.before).mT @ grad_y + chunk.carry * grad_after - read.mT @ grad_values

    width = chunk.before.shape[-1]
    since = _narrowed(q * asked + k * came, width).flip(2).cumsum(2).flip(2)  # sums over every position and all later ones
    until = _narrowed(k * ended, width).cumsum(2).roll(1, 2)  # sums over all earlier positions
    until[:, :, 0] = 0
    kept = _narrowed(chunk.before[:, :, -1] * (grad_after * state).sum(-1), width).unsqueeze(2)
    across = _across(chunk.pair_gradients(grad_scores, grad_products))
    return (
        _Gradients(
            q=from_q + asked,
            k=as_row + as_column + came + ended,
            v=grad_values,
            beta=(grad_right * unread).sum(-1) + (grad_system * products).sum(-1),
            log_decay=since + until + kept + across,
        ),
        grad_state,
    )


def _as_given(chunk: _DeltaChunk, gradients: _Gradients, given: GatedDeltaInputs) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Gradients of q, k, v, decay and beta as they are given, [B, C, …], of A_log and of dt_bias."""
    key_heads, width = given.q.shape[2:]
    of_keys = []
    for unit, gradient, inverse, scale in (
        (chunk.q, gradients.q, chunk.lengths[0], width**-0.5),
        (chunk.k, gradients.k, chunk.lengths[1], 1),
    ):
        summed = torch.unflatten(gradient, 1, (key_heads, -1)).sum(2) * scale
        own = torch.unflatten(unit, 1, (key_heads, -1))[:, :, 0] / scale
        of_keys.append((inverse * (summed - own * (own * summed).sum(-1, keepdim=True))).transpose(1, 2))
    beta = chunk.beta.squeeze(-1)
    grad_beta = gradients.beta * beta * (1 - beta / given.beta_limit)
    grad_raw = gradients.log_decay * -upcast(given.A_log).exp().view(-1, 1, 1) * torch.sigmoid(chunk.raw)
    grad_decay = grad_raw.transpose(1, 2)
    if given.decay.dim() == 3:
        grad_decay, of_dt_bias = grad_decay.squeeze(-1), grad_raw.sum((0, 2, 3))
    else:
        of_dt_bias = grad_raw.sum((0, 2))
    made = (*of_keys, gradients.v.transpose(1, 2), grad_decay, grad_beta.transpose(1, 2))
    return made, (gradients.log_decay * chunk.log_decay).sum((0, 2, 3)), of_dt_bias


def _chunk(given: GatedDeltaInputs, positions: slice) -> _DeltaChunk:
    q, k, v, decay, beta, A_log, dt_bias, starts, _, _, beta_limit = given
    repeats = v.shape[2] // q.shape[2]
    units, lengths = [], []
    for tensor, scale in ((q, q.shape[3] ** -0.5), (k, 1)):
        own = upcast(tensor[:, positions]).transpose(1, 2)
        inverse = (own.square().sum(-1, keepdim=True) + EPS).rsqrt()
        units.append((own * inverse * scale).repeat_interleave(repeats, 1))
        lengths.append(inverse)
    raw = upcast(decay[:, positions]) + upcast(dt_bias)
    raw = (raw.unsqueeze(-1) if decay.dim() == 3 else raw).transpose(1, 2)
    log_decay = -upcast(A_log).exp().view(-1, 1, 1) * softplus(raw)
    pair, before = span_sums(log_decay.mT).exp_().tril_(), log_decay.cumsum(2).exp()
    if starts is not None:
        own_starts = starts[:, positions]
        position = torch.arange(positions.start, positions.stop, device=starts.device)
        pair = pair * (position >= own_starts.unsqueeze(-1))[:, None, None]
        before = before * (own_starts < positions.start)[:, None, :, None]
    return _DeltaChunk(
        q=units[0],
        k=units[1],
        v=upcast(v[:, positions]).transpose(1, 2),
        beta=(beta_limit * upcast(beta[:, positions]).sigmoid()).transpose(1, 2).unsqueeze(-1),
        raw=raw,
        log_decay=log_decay,
        pair=pair,
        before=before,
        lengths=(lengths[0], lengths[1]),
    )


def _chunks(segment: slice, chunk_size: int) -> list[slice]:
    """The chunks of a segment."""
    return [
        slice(segment.start + part.start, segment.start + part.stop) for part in row_blocks(segment.stop - segment.start, 1, chunk_size)
    ]


def _across(pairs: Tensor) -> Tensor:
    """Sums over the pairs (i, j) with i ≥ m > j, for each position m: [B, H, W, C, C] -> [B, H, C, W].

    A sum of its own terms: differences of sums over whole rows and columns would have the rounding of the larger.
    """
    from_each_on = pairs.flip(3).cumsum(3).flip(3)
    return from_each_on.tril(-1).sum(-1).transpose(2, 3)


def _narrowed(gradient: Tensor, width: int) -> Tensor:
    """A gradient of decays of the key width, summed where one decay serves all of it."""
    return gradient.sum(-1, keepdim=True) if width == 1 else gradient


def _zero_state(given: GatedDeltaInputs) -> Tensor:
    shape = given.q.shape[0], given.v.shape[2], given.q.shape[3], given.v.shape[3]
    return torch.zeros(shape, dtype=accumulator_dtype(given.q.dtype), device=given.q.device)
