"""FLOPs against independent counts: matrices of the inventory, masks drawn out pair by pair, algorithms written as matrix products."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ideal_works import attention_core, delta_rule, m2rnn, mimo_ssd, selective_scan, ssd

from megakernels.ops.attention.facts import pairs_before as visible_pairs
from megakernels.ops.attention.facts import query_tiles
from megakernels.ops.causal_conv1d.facts import causal_conv1d
from megakernels.ops.gated_conv1d.facts import GatedConvolutionSizes
from megaplan.blocks.work import Workload, total
from megaplan.cost.blocks import adapter_name, layer_works, rank_workload
from megaplan.cost.formulas import FORMULAS
from megaplan.cost.model import ModelCosts, flops_per_token, model_costs
from megaplan.families.linear_attention.lightning import lightning_work
from megaplan.families.linear_attention.matrix_lstm import mlstm_work
from megaplan.families.linear_attention.section import LightningAttention, MatrixLstm
from megaplan.families.moe.composition import routing
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Block, Owner
from megaplan.spec.models import GatedDeltaNet, MatrixRecurrence, MixtureOfExperts, Spec

PLANS = Path(__file__).parents[3] / "plans"
SMALL = st.integers(1, 9)


def load(name: str) -> Spec:
    return Spec.model_validate(yaml.safe_load((PLANS / f"{name}.yaml").read_text()))


def costs_of(spec: Spec) -> ModelCosts:
    return model_costs(spec, build_inventory(spec))


def matrix_elements(block: Block, moe: MixtureOfExperts | None = None) -> int:
    """Elements of every matrix that a token is multiplied with: 2-D weights, and top_k of a bank's experts."""
    total = 0
    for tensor in block.tensors:
        if tensor.owner is Owner.EXPERT_PARALLEL:
            assert moe is not None
            total += tensor.elements // moe.num_experts * moe.top_k
        elif len(tensor.shape) == 2 and tensor.name.endswith(".weight") and "conv" not in tensor.name:
            total += tensor.elements
    return total


class Counter:
    """Adds up 2·m·k·n of every matrix product it is shown."""

    def __init__(self) -> None:
        self.flops = 0

    def product(self, m: int, k: int, n: int) -> None:
        self.flops += 2 * m * k * n


GROUPED = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LATENT = {
    "kind": "mla",
    "num_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


@pytest.mark.requirement("R-15")
@pytest.mark.parametrize("attention", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_a_window_counts_on_the_layers_that_have_it(attention: dict[str, object]) -> None:
    """Layers are counted by global index: one layer without it has the cost that it has if no layer has one."""
    costs = []
    for more in ({}, {"window_size": 5}, {"window_size": 5, "full_layers": [2]}, {"windows": [{"size": 5, "layers": [1]}]}):
        model = {"pattern": "AA", "num_layers": 4, "hidden_size": 32, "vocab_size": 64, "attention": attention | more}
        batch = {"micro_batch_size": 1, "seq_length": 64}
        costs.append(costs_of(Spec.model_validate({"format": "megaplan.spec/1", "name": "w", "model": model, "batch": batch})).layers)
    full, narrow, mixed, several = costs
    assert mixed == (narrow[0], narrow[1], full[2], narrow[3])
    assert several == (full[0], narrow[1], full[2], full[3])
    assert narrow[2].total_flops < full[2].total_flops


@settings(max_examples=60)
@given(seq=st.integers(1, 40), window=st.none() | st.integers(1, 50))
def test_visible_pairs_are_the_mask_s(seq: int, window: int | None) -> None:
    """Position i sees j when i − window < j ≤ i: counted one by one."""
    mask = [(i, j) for i in range(seq) for j in range(seq) if j <= i and (window is None or j > i - window)]
    assert visible_pairs(seq, window) == len(mask)
    assert query_tiles(seq, window, 1) == (seq, len(mask), len(mask))


@settings(max_examples=100)
@given(seq=st.integers(1, 40), window=st.none() | st.integers(1, 50), rows=st.integers(1, 50))
def test_tiles_of_queries_have_the_keys_that_any_of_them_sees(seq: int, window: int | None, rows: int) -> None:
    """A tile reads the keys from the window of its first query to its last query."""
    blocks = [range(start, min(start + rows, seq)) for start in range(0, seq, rows)]
    keys = [block.stop - (0 if window is None else max(0, block.start - window + 1)) for block in blocks]
    assert query_tiles(seq, window, rows) == (len(blocks), sum(keys), sum(len(b) * seen for b, seen in zip(blocks, keys, strict=True)))


@settings(max_examples=60)
@given(seq=st.integers(1, 20), window=st.none() | st.integers(1, 25), heads=SMALL, dim=SMALL, value=SMALL)
def test_attention_core_counts_two_products_forward_and_five_backward(
    seq: int, window: int | None, heads: int, dim: int, value: int
) -> None:
    """Row by row: q kᵀ, p v; then q kᵀ again, dp, dv, dq, dk. Rounding adds less than one FLOP a token."""
    forward, backward = Counter(), Counter()
    for i in range(seq):
        visible = min(i + 1, window or seq)
        for _ in range(heads):
            forward.product(1, dim, visible)  # scores
            forward.product(1, visible, value)  # out
            backward.product(1, dim, visible)  # scores again
            backward.product(1, value, visible)  # dp
            backward.product(visible, 1, value)  # dv
            backward.product(1, visible, dim)  # dq
            backward.product(visible, 1, dim)  # dk
    load_ = Workload(seq, seq, 2)
    work = attention_core(load_, num_heads=heads, num_kv_heads=1, head_dim=dim, value_dim=value, window_size=window)
    assert 0 <= work.forward * seq - forward.flops < seq
    assert 0 <= work.input_grad * seq - backward.flops < 3 * seq
    assert work.weight_grad == 0


@settings(max_examples=60)
@given(chunks=st.integers(1, 4), chunk=SMALL, groups=st.integers(1, 3), per_group=st.integers(1, 3), width=SMALL, state=SMALL)
def test_ssd_counts_the_chunked_products(*, chunks: int, chunk: int, groups: int, per_group: int, width: int, state: int) -> None:
    """Chunk by chunk: C Bᵀ a group; its product with x, the chunk's state, and the state's reading a head."""
    heads = groups * per_group
    forward, scores = Counter(), Counter()
    for _ in range(chunks):
        for _ in range(groups):
            scores.product(chunk, state, chunk)
        for _ in range(heads):
            forward.product(chunk, chunk, width)
            forward.product(state, chunk, width)
            forward.product(chunk, state, width)
    seq = chunks * chunk
    work = ssd(Workload(seq, seq, 2), num_heads=heads, head_dim=width, state_dim=state, num_groups=groups, chunk_size=chunk)
    total = forward.flops + scores.flops
    assert work.forward * seq == total
    assert work.input_grad * seq == 2 * total + scores.flops
    assert (work.weight_grad, work.recomputed * seq) == (0, scores.flops)


@settings(max_examples=40)
@given(chunks=st.integers(1, 3), positions=SMALL, rank=st.integers(1, 4), heads=SMALL, width=SMALL, state=SMALL)
def test_mimo_ssd_counts_rank_rows_a_position(*, chunks: int, positions: int, rank: int, heads: int, width: int, state: int) -> None:
    """A chunk has positions × rank rows; all its products are per head."""
    rows = positions * rank
    forward, scores = Counter(), Counter()
    for _ in range(chunks * heads):
        scores.product(rows, state, rows)
        forward.product(rows, rows, width)
        forward.product(state, rows, width)
        forward.product(rows, state, width)
    seq = chunks * positions
    sizes = {"num_heads": heads, "head_dim": width, "state_dim": state, "num_groups": 1, "chunk_size": positions}
    work = mimo_ssd(Workload(seq, seq, 2), mimo_rank=rank, save_every=seq, **sizes)
    assert work.forward * seq == forward.flops + scores.flops
    assert work.recomputed * seq == scores.flops


@settings(max_examples=40)
@given(heads=SMALL, key=SMALL, value=SMALL, seq=st.integers(1, 12))
def test_m2rnn_counts_the_step_s_products(heads: int, key: int, value: int, seq: int) -> None:
    """A step and head: H W, k vᵀ, qᵀ H; the gradients of each; the first two again for the states that are not kept."""
    forward, inputs, weights = Counter(), Counter(), Counter()
    for _ in range(seq * heads):
        forward.product(key, value, value)  # H W
        forward.product(key, 1, value)  # k vᵀ
        forward.product(1, key, value)  # qᵀ H
        inputs.product(key, value, value)  # dH from dZ Wᵀ
        inputs.product(1, key, value)  # dv
        inputs.product(key, value, 1)  # dk
        inputs.product(key, value, 1)  # dq
        inputs.product(key, 1, value)  # dH from q dyᵀ
        inputs.product(key, value, value)  # H W again
        inputs.product(key, 1, value)  # k vᵀ again
        weights.product(value, key, value)  # dW
    section = MatrixRecurrence(kind="m2rnn", num_heads=heads, key_dim=key, value_dim=value, save_every=4)
    work = m2rnn(Workload(seq, seq, 4), section)
    assert (work.forward * seq, work.input_grad * seq, work.weight_grad * seq) == (forward.flops, inputs.flops, weights.flops)


@pytest.mark.requirement("R-5")
@pytest.mark.parametrize("name", ["nam56r-8xh200", "llama-3.1-8b", "mixtral-8x7b", "mamba-codestral-7b", "tiny-hybrid"])
def test_a_layer_is_its_matrices_and_its_core(name: str) -> None:
    """Forward FLOPs are 2 · the matrices' elements and the core; the weight gradient is the matrices' and that of convolutions and W."""
    spec = load(name)
    inventory, model = build_inventory(spec), spec.model
    load_ = Workload(spec.batch.seq_length, 1, 2)
    pairs = load_.seq_length + 1  # two FLOPs times the mean number of visible keys, (T + 1) / 2
    for block, cost in zip(inventory.layers, costs_of(spec).layers, strict=True):
        matrices = 2 * matrix_elements(block, model.moe)
        core = weights = 0
        if block.family == "A" and model.attention is not None:
            attention = model.attention
            widths = 2 * attention.head_dim if attention.kind == "gqa" else 64 + 32 + 64
            core = pairs * attention.num_heads * widths
            if any(t.name.startswith("indexer") for t in block.tensors):
                beyond = load_.seq_length - attention.indexer.top_k  # queries that see more keys than they choose
                core += pairs * 8 * (64 + 1) - beyond * (beyond + 1) * attention.num_heads * widths // load_.seq_length
        if block.family == "M" and model.mamba is not None:
            mamba, width = model.mamba, next(t for t in block.tensors if t.name == "out_proj.weight").shape[1]
            sizes = {"num_heads": width // mamba.head_dim, "head_dim": mamba.head_dim, "state_dim": mamba.state_dim}
            sizes |= {"num_groups": mamba.num_groups}
            if mamba.kind == "mamba2":
                sizes["chunk_size"] = mamba.chunk_size
                weights = 2 * next(t for t in block.tensors if t.name == "conv1d.weight").elements
                core = ssd(load_, **sizes).forward + weights
            else:
                core = mimo_ssd(load_, mimo_rank=mamba.mimo_rank, chunk_size=16, save_every=256, **sizes).forward
        if block.family == "R" and model.recurrent is not None:
            convolved = 2 * sum(t.elements for t in block.tensors if t.name.startswith("conv") and t.name.endswith("weight"))
            recurrence = m2rnn(load_, model.recurrent)
            core, weights = recurrence.forward + convolved, recurrence.weight_grad + convolved
        assert cost.forward_flops == matrices + core, block.family
        assert cost.weight_grad_flops == matrices + weights, block.family


@pytest.mark.requirement("R-23")
@pytest.mark.parametrize("name", ["nam56r-8xh200", "tiny-hybrid"])
def test_the_ends_cost_what_the_split_contract_says(name: str) -> None:
    """Embedding 0; head 6·h·V, with Triton's kernels the logits once more; an MTP depth its A block, MLP, projection and one more head."""
    spec = load(name)
    model, costs, inventory = spec.model, costs_of(spec), build_inventory(spec)
    assert costs.embedding.total_flops == 0
    assert costs.embedding.moved_bytes > 0
    assert costs.head.total_flops == 8 * model.hidden_size * model.vocab_size
    if model.features.mtp is None:
        assert costs.mtp == ()
        assert costs.side_embeddings.total_flops == 0
        return
    (depth,) = costs.mtp
    core = costs.layers[0].total_flops - 6 * matrix_elements(inventory.layers[0])
    assert depth.total_flops == 6 * matrix_elements(inventory.block("mtp.0")) + core + costs.head.total_flops
    assert costs.side_embeddings.total_flops == 6 * model.hidden_size * (16 * 16 + 64)


@settings(max_examples=30)
@given(layers=st.integers(1, 3), hidden=st.integers(1, 4), heads=st.integers(1, 4), width=st.integers(1, 64), seq=st.integers(1, 64))
def test_six_n_rule_within_the_attention_term(layers: int, hidden: int, heads: int, width: int, seq: int) -> None:
    """Model FLOPs of a dense model are 6 · its matrices (head in, embedding out) plus the attention term 3 · 2 · (T + 1) · H · d."""
    model = {
        "pattern": "AD",
        "num_layers": 2 * layers,
        "hidden_size": 8 * hidden,
        "vocab_size": 50,
        "attention": {"kind": "gqa", "num_heads": heads, "num_kv_heads": heads, "head_dim": 8},
        "mlp": {"ffn_hidden_size": width},
    }
    batch = {"micro_batch_size": 1, "seq_length": seq}
    spec = Spec.model_validate({"format": "megaplan.spec/1", "name": "m", "model": model, "batch": batch})
    inventory = build_inventory(spec)
    embedding_and_norms = 50 * 8 * hidden + (2 * layers + 1) * 8 * hidden
    attention = layers * 3 * 2 * (seq + 1) * heads * 8
    assert flops_per_token(spec) == 6 * (inventory.parameters - embedding_and_norms) + attention


def test_flops_per_token_leaves_repeated_work_out() -> None:
    """Utilisation counts what the model needs; the device executes the repeated scores too."""
    spec = load("llama-3.1-8b")
    costs = costs_of(spec)
    executed = sum(cost.total_flops for cost in (*costs.layers, costs.head))
    scores, logits = (8192 + 1) * 32 * 128, 2 * spec.model.hidden_size * spec.model.vocab_size
    assert executed - flops_per_token(spec) == 32 * scores + logits


def test_head_and_loss_in_one_make_the_logits_twice() -> None:
    """The device multiplies once more, the model needs no more."""
    joined = load("llama-3.1-8b")
    spec = joined.model_copy(update={"host": joined.host.model_copy(update={"kernels": "reference"})})
    logits, (plain, again) = 2 * spec.model.hidden_size * spec.model.vocab_size, (costs_of(each).head for each in (spec, joined))
    assert again.total_flops - plain.total_flops == again.recomputed_flops == logits
    assert again.model_flops == plain.model_flops == 3 * logits
    assert again.activation_bytes > plain.activation_bytes


def test_every_formula_s_example_is_what_the_model_computes() -> None:
    """Each example's arithmetic holds, and its value equals the code's for the same sizes."""
    evaluated: dict[str, int] = {}
    for name, formula in FORMULAS.items():
        left, right = formula.example.split(" = ")
        evaluated[name] = int(right)
        assert eval(left.replace("·", "*"), {"__builtins__": {}}) == int(right), name
    llama, mixtral, joined = (load(name) for name in ("llama-3.1-8b", "mixtral-8x7b", "nam56r-8xh200"))
    flagship = joined.model_copy(update={"host": joined.host.model_copy(update={"kernels": "reference"})})
    head_128 = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "value_dim": 128}
    small = {"num_groups": 8, "chunk_size": 256, "head_dim": 64, "state_dim": 128}
    at_4096 = Workload(4096, 4096, 2)
    recurrent = flagship.model.recurrent
    assert recurrent is not None
    flagship_layers, moe = costs_of(flagship).layers, mixtral.model.moe
    assert moe is not None
    flagship_heads = {"num_heads": 28, "num_kv_heads": 28, "head_dim": 96, "value_dim": 64}
    not_chosen = attention_core(at_4096, **flagship_heads).forward - attention_core(at_4096, **flagship_heads, window_size=2048).forward
    heads = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128}
    delta = GatedDeltaNet.model_validate({"kind": "gated_delta", **heads})
    lightning = LightningAttention(kind="lightning", num_heads=64, head_dim=128, chunk_size=256)
    mlstm = MatrixLstm(kind="mlstm", num_heads=8, key_dim=256, value_dim=512)
    indexer_linears = 2 * (64 * 512 + 3584 * 64 + 3584 * 8)
    found = {
        "linear": costs_of(llama).layers[1].forward_flops // 3,
        "attention_core": attention_core(Workload(8192, 8192, 2), **head_128).forward,
        "indexer": flagship_layers[4].forward_flops - flagship_layers[0].forward_flops + not_chosen - indexer_linears,
        "ssd": ssd(at_4096, num_heads=128, **small).forward,
        "mimo_ssd": mimo_ssd(at_4096, num_heads=112, mimo_rank=4, save_every=256, **small | {"chunk_size": 16}).forward,
        "selective_scan": selective_scan(at_4096, channels=8192, state_dim=16, save_every=256).forward,
        "delta_rule": delta_rule(at_4096, delta).forward,
        "lightning": next(op.work.forward for op in lightning_work(at_4096, lightning, 6144) if op.name == "lightning"),
        "mlstm": next(op.work.forward for op in mlstm_work(at_4096, mlstm, 4096) if op.name == "mlstm"),
        "gated_conv1d": GatedConvolutionSizes(1, 4096, 2048, 3, False, 2).work().forward,
        "m2rnn": m2rnn(at_4096, recurrent).forward,
        "causal_conv1d": causal_conv1d(8192 + 2 * 8 * 128, 4, 2).forward,
        "experts": costs_of(mixtral).layers[1].forward_flops - evaluated["router"],
        "router": total(routing(at_4096, moe, 4096)).forward,
        "head": costs_of(flagship).head.total_flops,
        "weight_bytes": costs_of(llama).layers[1].weight_bytes,
        "flops_per_token": flops_per_token(llama),
    }
    assert found == evaluated


LATENTS = {
    "kind": "mla", "num_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
}  # fmt: skip


@pytest.mark.parametrize("low", [False, True])
def test_gathered_latents_expand_for_all_tokens_twice(make_spec, low):
    """Each rank multiplies all tokens' latents, in forward and again in backward; in eight bits gradients are its own tokens'."""
    spec = make_spec("A", model={"attention": LATENTS}, mesh={"cp": 2, "context_exchange": "latents"})
    load = rank_workload(spec, spec.precision.of("A"))._replace(low=low)
    ups = [op for op in layer_works(load, spec.model, build_inventory(spec).layers[0]) if op.name == "kv_up"]
    product = 2 * 32 * 8 * (16 + 24)
    assert (len(ups), sum(op.weights for op in ups)) == (2, product // 2)
    assert sum(op.work.forward for op in ups) == sum(op.work.recomputed for op in ups) == 2 * product
    assert sum(op.work.weight_grad for op in ups) == product * (1 if low else 2)
    assert sum(op.work.input_grad for op in ups) == product * (3 if low else 4)


def test_adapters_of_gathered_latents_multiply_what_the_linear_does(make_spec):
    """Narrow rows of all tokens, made twice; packed rows are unpacked once forward and once backward, whatever the number of groups."""
    lora = {"rank": 3, "alpha": 3.0, "base": "int8", "base_block": 4, "double_quant": False}
    found = []
    for exchange in ("heads", "latents"):
        spec = make_spec("A", model={"attention": LATENTS}, mesh={"cp": 2, "context_exchange": exchange}, lora=lora)
        load = rank_workload(spec, spec.precision.of("A"))
        found.append(layer_works(load, spec.model, build_inventory(spec).layers[0]))
    adapters = [next(op for op in ops if op.name == adapter_name("kv_up")) for ops in found]
    heads, latents = (op.work for op in adapters)
    assert heads.forward == 2 * 3 * (32 + 8 * (16 + 24))
    assert (latents.forward, latents.weight_grad) == (2 * heads.forward, 2 * heads.weight_grad)
    assert latents.input_grad == 2 * (heads.input_grad + heads.forward)
    assert len({sum(op.unpacked[0] for op in ops if op.name == "kv_up") for ops in found}) == 1
    assert adapters[1].runs_in(frozenset({"attention"}))
    assert not adapters[0].runs_in(frozenset({"attention"}))
