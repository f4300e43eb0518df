"""The predicted step follows its parts: more work takes longer, degrees divide, overlap hides, and constants are physical."""

from collections import Counter
from dataclasses import replace

import pytest

from megaplan.columns import Basis
from megaplan.cost.model import model_costs
from megaplan.cost.step.blocks import kinds_in, ledger_of
from megaplan.cost.step.compose import PassTerms, pass_seconds
from megaplan.cost.step.constants import constants, intervals, values
from megaplan.cost.step.data import once_of
from megaplan.cost.step.fitted import OTHERS
from megaplan.cost.step.frameworks import framework, frameworks, known_release
from megaplan.cost.step.grouped import BIAS_BYTES, padding
from megaplan.cost.step.launch import EXPERT_KERNELS
from megaplan.cost.step.names import names_of, rates_of
from megaplan.cost.step.parameters import held
from megaplan.cost.step.predict import StepTimer, peak_of, predict_step
from megaplan.cost.step.transfers import neighbouring_copies, short_ring
from megaplan.cost.step.workload import BatchShape, Machine, MeshShape, Recomputed, Sharded, Software, StageShape, TimedStep
from megaplan.devices import device_names, load_device
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec


def spec_of(pattern: str, num_layers: int, hidden: int, vocab: int, **sections) -> Spec:
    model = {"pattern": pattern, "num_layers": num_layers, "hidden_size": hidden, "vocab_size": vocab, "tie_embeddings": False, **sections}
    return Spec.model_validate(
        {"format": "megaplan.spec/1", "name": "m", "model": model, "batch": {"micro_batch_size": 1, "seq_length": 4096}}
    )


def grouped(heads: int, groups: int) -> dict:
    return {"kind": "gqa", "num_heads": heads, "num_kv_heads": groups, "head_dim": 128}


EXPERTS = {"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768}
LLAMA = spec_of("AD", 64, 4096, 128256, attention=grouped(32, 8), mlp={"ffn_hidden_size": 14336})
MOE, PADDED = (
    spec_of("AE", 96, 2048, 151936, attention=grouped(32, 4), moe=EXPERTS | {"capacity_factor": factor}) for factor in (None, 1.5)
)
HYBRID = spec_of(
    *("M" * 23 + "E" * 23 + "A" * 6, 52, 2688, 131072),
    attention=grouped(32, 2),
    moe={"num_experts": 128, "top_k": 6, "ffn_hidden_size": 1856, "shared_ffn_hidden_size": 3712, "activation": "relu2"},
    mamba={"kind": "mamba2", "num_heads": 64, "head_dim": 64, "state_dim": 128, "num_groups": 8},
)


def step(spec: Spec = LLAMA, device: str = "h100-sxm", again: Recomputed | None = None, **given) -> TimedStep:
    """Eight devices, one stage unless `pp` is given; every other word is the mesh's, the batch's or the software's."""
    mesh = MeshShape(**{"world": 8, "dp": 8, **{key: given.pop(key) for key in list(given) if key in MeshShape._fields}})
    batch = BatchShape(given.pop("micro", 1), given.pop("seq", 4096), given.pop("num_microbatches", 8))
    software, inventory = Software(**{"name": "megatron-bridge", "release": "26.04", **given}), build_inventory(spec)
    share = {kind: count / mesh.pp for kind, count in Counter(kinds_in(inventory).layers).items()}
    stages = [StageShape(1.0, share, True, mesh.pp == 1)]
    if mesh.pp > 1:
        stages += [StageShape(mesh.pp - 2.0, share)] * (mesh.pp > 2) + [StageShape(1.0, share, False, True)]
    machine = Machine.of(load_device(device))
    return TimedStep(spec, inventory, mesh, batch, software, machine, tuple(stages), again or Recomputed())


def seconds(*arguments, **given) -> float:
    return predict_step(step(*arguments, **given)).seconds


@pytest.mark.parametrize("model", [LLAMA, MOE, HYBRID], ids=["dense", "moe", "hybrid"])
@pytest.mark.parametrize("device", sorted(device_names()))
def test_every_device_is_timed_below_its_peak(model, device):
    work = step(model, device)
    found = predict_step(work)
    model_flops = model_costs(model, work.inventory).model_flops
    assert 0 < model_flops * found.tokens_per_second_per_device / peak_of(work.machine, "bf16") < 0.9
    assert found.tokens_per_second_per_device == pytest.approx(4096 * 8 / found.seconds)
    assert all(value >= 0 for value in found.terms.values())


@pytest.mark.parametrize("model", [LLAMA, MOE, HYBRID], ids=["dense", "moe", "hybrid"])
@pytest.mark.parametrize("more", [{"micro": 2}, {"seq": 8192}, {"num_microbatches": 16}, {"again": Recomputed(1.0)}])
def test_more_work_takes_longer(model, more):
    assert seconds(model, **more) > 1.05 * seconds(model)


def test_time_grows_with_microbatches_alone():
    one, two, three = (seconds(num_microbatches=count) for count in (8, 16, 24))
    assert three - two == pytest.approx(two - one, rel=1e-6)


def test_narrow_products_cost_more_than_their_share():
    """Eight tensor ranks take more device time than one, transfers aside."""
    one = predict_step(step(LLAMA, dp=8)).terms
    eight = predict_step(step(LLAMA, dp=1, tp=8)).terms
    assert eight["gemm"] > one["gemm"] / 8
    assert eight["tensor"] > 0
    assert "tensor" not in one


def test_more_chunks_shrink_the_bubble():
    plain = seconds(world=64, pp=8, dp=8)
    assert seconds(world=64, pp=8, dp=8, vpp=4) < plain


@pytest.mark.parametrize(
    ("model", "plain", "better"),
    [
        (LLAMA, {"tp": 4, "dp": 2}, {"tp_overlap": True}),
        (MOE, {"ep": 8, "dispatcher": "hybridep"}, {"exchange_overlap": True}),
        (MOE, {"ep": 8}, {"dispatcher": "hybridep"}),
        (MOE, {"ep": 8}, {"graphs": frozenset({"full"})}),
        (LLAMA, {"seq": 32768}, {"fp8_attention": True}),
        (LLAMA, {"name": "torchtitan", "release": None, "compiled": False}, {"compiled": True}),
    ],
)
def test_a_launch_flag_saves_time(model, plain, better):
    assert seconds(model, **(plain | better)) < seconds(model, **plain)


@pytest.mark.parametrize("device", ["h100-sxm", "gb200"])
def test_fp8_is_faster_where_products_are_large(device):
    assert seconds(LLAMA, device, dtype="fp8", micro=2) < seconds(LLAMA, device, micro=2)


@pytest.mark.parametrize(
    ("ep", "dispatcher", "copies"), [(1, "alltoall", 8), (4, "alltoall", 8), (1, "deepep", 1), (4, "hybridep", 4 * (1 - 0.75**8))]
)
def test_ranks_that_share_an_expert_gather_every_row_that_came(ep, dispatcher, copies):
    """4,096 tokens of 2,048 channels in bf16 on two ranks: eight rows per token from an all-to-all, one for each rank it has else."""
    work = step(MOE, tp=2, etp=2, ep=ep, dp=4, dispatcher=dispatcher, again=Recomputed(modules=frozenset({"moe"})))
    moved = {run: moved for run, group, moved, _ in ledger_of(work, "E").transfers if group == "tensor"}
    gathered = 2048 * 2048 * 2 * copies * short_ring(2)
    assert moved == {0: pytest.approx(2 * gathered), 1: pytest.approx(4 * gathered)}


def test_exchange_over_nodes_is_slower_than_in_a_domain():
    inside, across = (predict_step(step(MOE, device, world=64, ep=32, dp=64)).terms["exchange"] for device in ("gb200", "b200"))
    assert across > 3 * inside


def test_a_padded_capacity_costs_experts_alone():
    plain, more = (predict_step(step(model, ep=8, micro=4)).terms for model in (MOE, PADDED))
    assert more["permutation"] == pytest.approx(1.5 * plain["permutation"])
    assert 1.3 < more["grouped"] / plain["grouped"] < 1.5
    assert more["attention"] == plain["attention"]


def test_sharded_parameters_are_gathered_for_every_microbatch():
    plain = step(LLAMA, name="torchtitan", release=None, world=64, dp=64)
    sharded = replace(plain, software=plain.software._replace(sharded=Sharded("fsdp2")))
    assert predict_step(sharded).seconds > predict_step(plain).seconds


def test_a_timer_answers_as_a_single_step_does():
    base = step(MOE)
    timer = StepTimer(base)
    for given in (
        {"ep": 8},
        {"ep": 4, "tp": 2, "dp": 4},
        {"ep": 8, "world": 16, "dp": 16},
        {"micro": 2},
        {"ep": 8, "pp": 2, "dp": 4, "vpp": 2},
    ):
        one = step(MOE, **given)
        assert timer.time(one.mesh, one.batch, one.stages) == predict_step(one)


def test_every_constant_has_a_basis_and_a_source_and_is_physical():
    for name, constant in constants().items():
        assert constant.basis in {Basis.FITTED, Basis.MODELLED}, name
        assert constant.source
        assert 0 < constant.spread < 1, name
        if constant.unit == "share":
            assert 0 < constant.value <= 1, name
    assert all(constants()[f"grouped.{generation}"].value <= 1 for generation in ("ampere", "hopper", "blackwell"))


def multiplying(dtype: str) -> list[str]:
    """Devices on which a step may have a dtype: TPUs have no scales of blocks, which is MP507, and they alone have int8."""
    tpu = {name: load_device(name).generation == "tpu" for name in device_names()}
    return [name for name, is_tpu in tpu.items() if dtype in ("bf16", "fp8") or is_tpu is (dtype == "int8")]


@pytest.mark.parametrize("name", sorted(frameworks()))
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "mxfp8", "nvfp4", "int8"])
def test_no_rate_is_above_the_ceiling(name, dtype):
    """Products below the data sheet's peak, grouped ones below dense ones, attention below its products' peak, links below theirs."""
    for device in multiplying(dtype):
        for model in (LLAMA, MOE, HYBRID):
            rates = rates_of(names_of(step(model, device, name=name, dtype=dtype)), values())
            assert rates[f"product.{dtype}"] <= 1, (device, dtype)
            shares = ("grouped", "weights", "memory", "attention.0", "attention.1", "scan", "tensor", "exchange", "node", "network")
            for rate in shares:
                assert 0 < rates[rate] <= 1, (device, rate)


def test_intervals_hold_one():
    classes = {f"{kind}{family}" for kind in ("", "near ", "far ") for family in ("dense", "moe", "hybrid")} | {"replayed"}
    assert set(intervals()) == {*classes, OTHERS}
    assert all(intervals()[name][0] < 1 < intervals()[name][1] for name in classes)


@pytest.mark.parametrize("name", sorted(frameworks()))
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "mxfp8", "nvfp4", "int8"])
def test_every_framework_and_device_finds_its_constants(name, dtype):
    for device in multiplying(dtype):
        for model in (LLAMA, MOE, HYBRID):
            for release in (None, "24.01", "26.05", "99.01"):
                work = step(model, device, name=name, release=release, dtype=dtype, ep=8 if model is not LLAMA else 1)
                assert {constant for factors in names_of(work).values() for constant in factors} <= set(constants())


def test_a_release_between_two_takes_the_older():
    assert known_release("megatron-bridge", "26.05") == "26.04"
    assert known_release("megatron-bridge", "20.01") == framework("megatron-bridge").releases[0]
    assert known_release("megatron-bridge", None) is None
    assert known_release("torchtitan", "1.0") is None


def test_layers_with_a_window_are_a_kind_of_their_own():
    """Blocks that are computed in full have 1.5 times the pairs of a window."""
    attention = grouped(32, 8) | {"window_size": 512, "full_layers": [0]}
    work = step(spec_of("AD", 6, 4096, 32000, attention=attention, mlp={"ffn_hidden_size": 14336}))
    assert kinds_in(work.inventory).layers == ("A", "D", "A2", "D", "A2", "D")
    full, windowed = (sum(core.flops for core in ledger_of(work, kind).attention) for kind in ("A", "A2"))
    pairs = 512 * 513 / 2 + (4096 - 512) * 512
    assert windowed / full == pytest.approx(1.5 * pairs / (4096 * 4097 / 2), rel=1e-3)


def test_an_operation_that_a_block_has_takes_time():
    """An output gate widens the product of the block's input; norms of queries and keys move bytes."""
    plain, gated, normed = (
        ledger_of(step(spec_of("AD", 2, 4096, 32000, attention=grouped(32, 8) | more, mlp={"ffn_hidden_size": 14336})), "A")
        for more in ({}, {"gate": True}, {"qk_norm": True})
    )
    assert gated.products[0].flops / plain.products[0].flops == (2 * 4096 + 2 * 1024) / (4096 + 2 * 1024)
    assert normed.products == plain.products
    moved = [sum(each.moved for each in found.moved if each.run == 0) for found in (plain, normed)]
    assert moved[1] - moved[0] == 4096 * (2 * (4096 + 1024) * 2 + 40 * 4)


def test_packed_documents_attend_to_themselves_alone():
    """Whole blocks of 128 keys and the document: 64 + 128 of 4,097 are 21 times fewer."""
    whole = step(seq=4096)
    packed = replace(whole, batch=whole.batch._replace(document=64.0))
    plain, fewer = (predict_step(work).terms for work in (whole, packed))
    assert plain["attention"] / fewer["attention"] == pytest.approx(4097 / (64 + 128))
    assert {term: fewer[term] for term in ("gemm", "memory")} == {term: plain[term] for term in ("gemm", "memory")}
    long = replace(whole, batch=whole.batch._replace(document=4096.0))
    assert predict_step(long).terms == plain


def test_a_head_in_the_recipes_dtype_is_faster_and_casts():
    plain, low = (predict_step(step(LLAMA, "b200", dtype="mxfp8", low_head=low)).terms for low in (False, True))
    assert low["gemm"] < plain["gemm"]
    assert low["casts"] > plain["casts"]


def test_fused_experts_cast_fewer_rows_and_keep_the_activation_to_themselves():
    """Release 26.06, in mxfp8 under one graph an iteration: of 2 · 2048 + 3 · 768 cast columns the inner 3 · 768 are written so."""
    older, newer, parts = (
        predict_step(step(MOE, "b200", dtype="mxfp8", ep=8, release=release, graphs=graphs)).terms
        for release, graphs in (("26.04", {"full"}), ("26.06", {"full"}), ("26.06", {"moe_router"}))
    )
    casts, memory = ([each[name] / each["grouped"] for each in (older, newer, parts)] for name in ("casts", "memory"))
    assert casts[1] < casts[0] == pytest.approx(casts[2])
    assert memory[1] < memory[0] == pytest.approx(memory[2])
    assert newer["grouped"] / older["grouped"] == pytest.approx(newer["gemm"] / older["gemm"])  # the constant of the release


def test_neighbouring_experts_are_on_few_ranks():
    assert neighbouring_copies(8, 8, 128) == 1 + 7 / 16
    assert neighbouring_copies(8, 1, 128) == 1
    assert neighbouring_copies(4, 64, 64) == 4
    anywhere, beside = (predict_step(step(MOE, ep=8, dispatcher="deepep", neighbours=near)).terms for near in (False, True))
    assert beside["exchange"] < 0.6 * anywhere["exchange"]
    rows = (predict_step(step(MOE, ep=8, dispatcher="alltoall", neighbours=near)).terms["exchange"] for near in (False, True))
    assert next(rows) == next(rows)


@pytest.mark.parametrize(("dispatcher", "ep", "rows"), [("alltoall", 8, 57), ("alltoall", 1, 57), ("deepep", 8, 57), ("deepep", 1, 25)])
def test_all_to_all_sorts_rows_by_expert_also_without_expert_parallelism(dispatcher, ep, rows):
    """Forward moves 7 k + 1 rows per token with the second sort and its inverse, and 3 k + 1 without them."""
    work = step(MOE, ep=ep, dispatcher=dispatcher)
    moved = sum(each.moved for each in ledger_of(work, "E").moved if (each.run, each.kind) == (0, "permute"))
    assert moved == rows * work.tokens * 2048 * 2


def test_sharded_experts_are_gathered_over_their_own_ranks():
    """Two data ranks of each expert: half of its elements come from the other one, for every microbatch."""
    work = step(MOE, world=16, dp=16, ep=8, name="automodel", release=None, sharded=Sharded("fsdp2"))
    found = once_of(work)
    assert (found.experts.gathered, found.sharded_experts.ranks) == (0, 2)
    assert found.sharded_experts.gathered == held(work).experts * 2
    alone = once_of(step(MOE, name="automodel", release=None, ep=8, sharded=Sharded("fsdp2")))
    assert alone.sharded_experts.ranks == 1


def test_hybrid_sharding_gathers_inside_a_domain_alone():
    """16 data ranks on two nodes: eight gather for every microbatch, and two exchange each eighth once a step."""
    given = {"world": 16, "dp": 16, "name": "torchtitan", "release": None}
    flat, hybrid = (once_of(step(LLAMA, sharded=Sharded("fsdp2", inside=inside), **given)) for inside in (False, True))
    assert (flat.sharded.ranks, flat.dense.gathered) == (16, 0)
    assert (hybrid.sharded.ranks, hybrid.sharded.gathered) == (8, flat.sharded.gathered)
    assert (hybrid.dense.ranks, hybrid.dense.gathered) == (2, flat.sharded.gathered / 8)
    assert seconds(sharded=Sharded("fsdp2", inside=True), **given) < seconds(sharded=Sharded("fsdp2"), **given)


def test_a_short_ring_reaches_what_was_measured():
    """NCCL's all-gather of 512 MiB beside 128 MiB on two, four and eight H200: 267, 326 and 347 of 450 GB/s."""
    measured = {2: 267, 4: 326, 8: 347}
    for ranks, reached in measured.items():
        assert short_ring(8) / short_ring(ranks) == pytest.approx(reached / measured[8], rel=0.03)
    assert short_ring(1e9) == pytest.approx(1)


def test_rows_are_padded_to_whole_multiples_on_every_rank():
    """Half a multiple an expert and rank: twice the share where tensor ranks halve the tokens; none in bf16."""
    own = step(MOE, dtype="mxfp8", ep=8)
    padded = replace(own, software=own.software._replace(padded_rows=True))
    routed = own.tokens * 8 / 128
    assert padding(own) == 1
    assert padding(padded) == 1 + 31 / 2 / routed
    halves = replace(padded, mesh=padded.mesh._replace(tp=2))
    assert padding(halves) - 1 == 2 * (padding(padded) - 1)
    assert padding(replace(padded, software=padded.software._replace(dtype="bf16"))) == 1
    flops = [sum(each.flops for each in ledger_of(work, "E").grouped) for work in (own, padded)]
    assert flops[1] / flops[0] == pytest.approx(padding(padded))
    assert predict_step(padded).seconds > predict_step(own).seconds


@pytest.mark.parametrize(("work", "launched"), [(0.010, 100.0), (0.001, 1000.0)])
def test_a_wait_adds_a_share_of_the_shorter_of_device_and_host(work, launched):
    rates = {"gap": 0.0, "moe": 1.0, "host": 1e-5}
    terms = PassTerms(work, 0.0, 0.0, launched)
    assert pass_seconds(terms, rates, 0.5) - pass_seconds(terms, rates) == pytest.approx(0.5e-3)


def waits(**given) -> set[str]:
    return {"sync", "sync.backward"} & names_of(step(MOE, ep=8, **given)).keys()


def test_the_host_waits_for_the_counts_of_an_all_to_all():
    assert waits() == {"sync"}
    assert waits(exchange_overlap=True) == waits(again=Recomputed(modules=frozenset({"moe"}))) == {"sync", "sync.backward"}
    assert not waits(dispatcher="hybridep") | waits(dispatcher="deepep") | waits(graphs=frozenset({"full"})) | waits(token_drop=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_experts_are_launched_one_by_one_unless_they_are_fused(dtype):
    """Two expert ranks hold twice the experts of four."""
    few, many, fewer = (ledger_of(step(MOE, ep=ep, dtype=dtype), "E") for ep in (4, 2, 8))
    for run, each in enumerate(EXPERT_KERNELS[dtype]):
        assert many.launched[run] - few.launched[run] == pytest.approx(MOE.model.moe.num_experts / 4 * each)
        assert few.launched[run] - fewer.launched[run] == pytest.approx(MOE.model.moe.num_experts / 8 * each)
    fused = {"dtype": "mxfp8", "release": "26.06", "graphs": frozenset({"full"})}
    assert ledger_of(step(MOE, ep=2, **fused), "E").kernels == ledger_of(step(MOE, ep=4, **fused), "E").kernels


def test_biases_of_experts_move_bytes_unless_they_are_fused():
    moe = MOE.model.moe.model_copy(update={"bias": True})
    biased = MOE.model_copy(update={"model": MOE.model.model_copy(update={"moe": moe})})
    rows = 4096 * MOE.model.moe.top_k * MOE.model.hidden_size
    fused = {"dtype": "mxfp8", "release": "26.06", "graphs": frozenset({"full"})}
    for given, expected in (({}, BIAS_BYTES), (fused, (0.0, 0.0))):
        own, more = (ledger_of(step(model, ep=8, **given), "E") for model in (MOE, biased))
        for run in (0, 1):
            moved = [sum(each.moved for each in found.moved if each.run == run and each.kind == "plain") for found in (own, more)]
            assert moved[1] - moved[0] == pytest.approx(expected[run] * rows)


@pytest.mark.parametrize("seq", [2048, 16384])
def test_scores_in_memory_take_their_bytes(seq):
    """Softmax moves 4 and 6 bytes of a score, dropout 5 in each pass; the products are among the others."""
    scores, attention = 32 * seq * seq, {}
    for kind, moved in (("fused", 0), ("plain", 10), ("dropped", 20)):
        timed = step(device="a100-80gb", seq=seq, unfused_attention=kind != "fused", attention_dropout=kind == "dropped")
        assert sum(each.moved for each in ledger_of(timed, "A").moved if each.kind == "scores") == moved * scores
        attention[kind] = predict_step(timed).terms["attention"]
    bandwidth = timed.machine.memory * rates_of(names_of(timed), values())["memory"]
    assert attention["dropped"] - attention["plain"] == pytest.approx(8 * 32 * 10 * scores / bandwidth)
    assert seconds(device="a100-80gb", seq=seq, unfused_attention=True) > seconds(device="a100-80gb", seq=seq)


def test_without_sequence_parallelism_every_rank_has_all_tokens():
    with_it, without = step(tp=4, dp=2), step(tp=4, dp=2, sequence_parallel=False)
    moved = [sum(each.moved for each in ledger_of(timed, "D").moved if each.run == 0) for timed in (with_it, without)]
    assert moved[0] < moved[1] < 4 * moved[0]
    sent = [sum(each.moved for each in ledger_of(timed, "D").transfers) for timed in (with_it, without)]
    assert sent[1] < sent[0]
    assert predict_step(without).terms["memory"] > predict_step(with_it).terms["memory"]
