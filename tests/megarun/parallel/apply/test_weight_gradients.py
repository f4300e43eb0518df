"""A backward in two halves: what the first leaves pending, and what the second adds."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from megaplan.hosts.megarun.halves import weigh_halves
from megaplan.hosts.megarun.ledger import block_bytes
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec
from megarun.engine.trainer import Trainer
from megarun.job.job import Job
from megarun.parallel.apply.weight_gradients import SplitLinear, WeightGradients, split_linears, weight_gradient
from megarun.parallel.groups.deferred import products
from megarun.parallel.groups.mesh import build_mesh

pytestmark = pytest.mark.runtime
CPU = torch.device("cpu")


@pytest.fixture
def trainer(one_process: Any, wrapped: None, worker: Any, spec_with: Any) -> Trainer:
    """The small hybrid, recomputed where it may be."""
    spec = spec_with({"recompute": {"default": "full", "blocks": {"M": "selective", "E": "selective"}}})
    job: Job = worker.build_job({"spec": spec, "spans": [[0, 5]]})
    return Trainer(job, build_mesh(Spec.model_validate(spec).mesh, CPU))


def _loss(trainer: Trainer) -> torch.Tensor:
    rows = (torch.arange(50) % 61).view(2, 25)
    (stage,) = trainer.stages
    stage.set_is_last_backward(False)  # type: ignore[operator]
    stage.set_requires_gradient_sync(False)  # type: ignore[operator]
    stage.set_reshard_after_backward(False)  # type: ignore[operator]
    return trainer._runner.loss(stage(rows[:, :-1]), rows[:, 1:])  # type: ignore[attr-defined]


def _gradients(trainer: Trainer) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for stage in trainer.stages for name, p in stage.named_parameters()}


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def test_the_first_half_leaves_linears_pending_and_the_second_completes_them(trainer: Trainer) -> None:
    """Gradients are bitwise equal to autograd's; a second microbatch accumulates; nothing is held afterwards."""
    (stage,) = trainer.stages
    for _ in range(2):
        torch.autograd.backward(_loss(trainer))
    expected = _gradients(trainer)
    for parameter in stage.parameters():
        parameter.grad = None
    split_linears(stage)
    store = WeightGradients(stage)
    for first in (True, False):
        with store.deferring():
            torch.autograd.backward(_loss(trainer))
        if first:
            missing = {name for name, gradient in _gradients(trainer).items() if gradient is None}
            assert missing == {name for name in expected if _is_linear(name)}
        compute = store.take()
        compute()
        compute()  # everything was freed when it was used
    found = _gradients(trainer)
    for name, gradient in expected.items():
        other = found[name]
        assert gradient is not None
        assert other is not None
        assert torch.equal(other, gradient), name
        assert not other.requires_grad


def test_a_recomputed_block_runs_twice_in_all(trainer: Trainer) -> None:
    """Once forward, once for the first half; torch's own split would run it four times."""
    (stage,) = trainer.stages
    split_linears(stage)
    store, counts = WeightGradients(stage), Counter[str]()
    for name, module in stage.named_modules():
        if isinstance(module, nn.Linear):
            inner = module.forward
            module.forward = lambda x, name=name, inner=inner: (counts.update([name]), inner(x))[1]
    with store.deferring():
        torch.autograd.backward(_loss(trainer))
    store.take()()
    assert counts["layers.0.q_proj"] == 2  # full
    assert counts["layers.1.out_proj"] == 1  # outside the region of selective
    assert max(counts.values()) == 2


def test_what_waits_does_not_hold_the_input() -> None:
    """A saved tensor's grad_fn leads to the input of the stage: a microbatch between I and W would keep it alive."""
    linear, store = nn.Linear(3, 5), WeightGradients(nn.Module())
    x = torch.randn(2, 4, 3, requires_grad=True)
    held = weakref.ref(x)
    with store.deferring():
        SplitLinear.apply(x.exp(), linear.weight, linear.bias).sum().backward()
    compute = store.take()
    del x
    assert held() is None
    assert compute.args[0], "nothing is pending"  # type: ignore[attr-defined]


def test_a_gradient_is_freed_before_the_next_input_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name left over from the product before would hold a gradient as large as the input that is gathered then."""
    store, weight = WeightGradients(nn.Module()), torch.zeros(5, 3)
    monkeypatch.setattr(store, "accumulate", lambda *_: None)
    gradient, seen = torch.ones(2, 5), list[Any]()
    held = weakref.ref(gradient)

    def fetch(rows: torch.Tensor) -> torch.Tensor:
        seen.append(held())
        return rows

    store.add([weight], torch.ones(2, 3), [gradient], None, products)
    store.add([weight], torch.ones(2, 3), [torch.ones(2, 5)], fetch, products)
    del gradient
    store.take()()
    assert seen == [None]


def test_a_whole_backward_defers_nothing() -> None:
    """Outside a split backward the function is a linear, bias included."""
    linear = nn.Linear(3, 5)
    x = torch.randn(2, 4, 3, requires_grad=True)
    expected = torch.autograd.grad(linear(x).square().sum(), [x, *linear.parameters()])
    found = torch.autograd.grad(SplitLinear.apply(x, linear.weight, linear.bias).square().sum(), [x, *linear.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert weight_gradient(linear.weight, x.detach(), torch.ones(2, 4, 5)) is not None


def test_the_input_gradient_is_not_a_view() -> None:
    """A view's base holds its storage, so autograd would not add another reader's gradient in place but make a third tensor of its size."""
    linear = nn.Linear(3, 5)
    output = SplitLinear.apply(torch.randn(2, 4, 3, requires_grad=True), linear.weight, linear.bias)
    is_view: list[bool] = []
    output.grad_fn.register_hook(lambda inputs, _: is_view.append(inputs[0]._is_view()))
    output.sum().backward()
    assert is_view == [False]


@pytest.mark.requirement("R-41")
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_what_waits_is_the_ledgers(policy: str, attention: str, one_process: Any, wrapped: None, worker: Any, spec_with: Any) -> None:
    """Layer by layer, the storages between the two halves are those that the budget counts."""
    blocks = {"M": "none" if policy == "none" else "selective", "E": "none" if policy == "none" else "selective"}
    latent = {
        "kind": "mla",
        "num_heads": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    overrides = {"recompute": {"default": policy, "blocks": blocks}, **({"model.attention": latent} if attention == "mla" else {})}
    job: Job = worker.build_job({"spec": spec_with(overrides), "spans": [[0, 5]]})
    trainer = Trainer(job, build_mesh(job.spec.mesh, CPU))
    (stage,) = trainer.stages
    split_linears(stage)
    store = WeightGradients(stage)
    with store.deferring():
        torch.autograd.backward(_loss(trainer))
    names = {id(p): name for name, p in stage.named_parameters()}
    found: dict[str, dict[int, int]] = {}
    for weights, rows, gradients, *_ in store._pending:
        layer = ".".join(names[id(weights[0])].split(".")[:2])
        storages = [tensor.untyped_storage() for tensor in (rows, *gradients)]
        found.setdefault(layer, {}).update({storage.data_ptr(): storage.nbytes() for storage in storages})
    splitting = job.spec.model_copy(update={"schedule": job.spec.schedule.model_copy(update={"kind": "zbv"})})
    for name, block in job.inventory.blocks():
        if name.startswith("layers."):
            sums = block_bytes(splitting, local_dims(job.spec), name, block)
            half = weigh_halves(sums)
            assert sorted(found[name].values()) == sorted(sums.part.tensors[tensor][0] for tensor in half.pending.tensors), name
