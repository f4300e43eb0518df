"""Recompute changes what is kept and what runs again, never a gradient."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.model.stage import Stage
from megarun.parallel.apply.recompute import recompute_stage

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-67")]
MLA = {"kind": "mla", "num_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "A": {},
    "mla": {"model.attention": MLA},
    "D": {},
    "gelu": {"model.mlp.activation": "gelu"},
    "E": {},
    "gathering E": {"host.kernels": "triton"},
    "M": {},
    "R": {},
}
LETTERS = {"mla": "A", "gelu": "D", "gathering E": "E"}
POLICIES = [(name, "selective") for name in FAMILIES] + [(name, "full") for name in FAMILIES if name not in ("E", "gathering E", "M")]
FORWARDS_AGAIN = {
    ("A", "selective"): {"attention": 1},
    ("A", "full"): {"rms_norm": 1, "rope": 2, "attention": 1},
    ("D", "selective"): {"swiglu": 1},
    ("D", "full"): {"rms_norm": 1, "swiglu": 1},
    ("E", "selective"): {"experts_gated": 1},
    ("gathering E", "selective"): {"routed_experts_gated": 1},
    ("M", "selective"): {"causal_conv1d": 1},
    ("R", "selective"): {"m2rnn": 1, "gated_rms_norm": 1},
    ("R", "full"): {"rms_norm": 1, "causal_conv1d": 2, "m2rnn": 1, "gated_rms_norm": 1},
}
PRODUCTS_AGAIN = {("A", "full"): 3, ("D", "full"): 2, ("M", "selective"): 1, ("R", "full"): 4}  # never the block's last projection


class OpCounter(TorchDispatchMode):
    """Number of runs of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def stage_of(spec_with: Any, letter: str, policy: str, overrides: dict[str, Any]) -> tuple[Spec, Stage]:
    pattern = {"model.pattern": letter, "model.num_layers": 2}
    spec = Spec.model_validate(spec_with({**pattern, "recompute": {"default": policy}, **overrides}))
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, 2)]).slots[0])
    recompute_stage(stage, spec, inventory)
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    return spec, stage


def forward_backward(spec: Spec, stage: Stage) -> tuple[torch.Tensor, Counter[str]]:
    """Logits, and how often each operation ran; two microbatches, so that gradients accumulate."""
    torch.manual_seed(0)
    with OpCounter() as counter:
        for _ in range(2):
            logits = stage(torch.randint(0, spec.model.vocab_size, (2, 24)))
            (logits * torch.randn_like(logits)).sum().backward()
    return logits.detach(), counter.counts


@pytest.mark.parametrize(("name", "policy"), POLICIES)
def test_gradients_are_those_without_recompute(name: str, policy: str, spec_with: Any) -> None:
    """Bitwise equal; only the region's operations run again, once per microbatch, in every layer but the last."""
    letter = LETTERS.get(name, name)
    spec, plain = stage_of(spec_with, letter, "none", FAMILIES[name])
    _, recomputed = stage_of(spec_with, letter, policy, FAMILIES[name])
    expected, once = forward_backward(spec, plain)
    found, again = forward_backward(spec, recomputed)
    assert torch.equal(found, expected)
    for (key, a), (_, b) in zip(recomputed.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), key
    assert [key for key, _ in recomputed.named_parameters()] == [key for key, _ in plain.named_parameters()]
    if (name, policy) in FORWARDS_AGAIN:
        ours = {key.removeprefix("_"): count for key, count in (again - once).items()}
        forwards = {key: count for key, count in ours.items() if hasattr(torch.ops.megakernels, key)}
        assert forwards == {key: 2 * count for key, count in FORWARDS_AGAIN[name, policy].items()}
        assert ours.get("mm", 0) == 2 * PRODUCTS_AGAIN.get((name, policy), 0)


def test_experts_that_gather_are_the_same_experts(spec_with: Any) -> None:
    """Logits and gradients, with a shared expert."""
    found, expected = (stage_of(spec_with, "E", "none", {"host.kernels": kernels}) for kernels in ("triton", "reference"))
    assert torch.equal(forward_backward(*found)[0], forward_backward(*expected)[0])
    for (key, a), (_, b) in zip(found[1].named_parameters(), expected[1].named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=key)


def test_what_a_family_refuses_is_an_error(spec_with: Any) -> None:
    """The rules refuse it first; the runtime never substitutes another policy."""
    for letter in "EM":
        with pytest.raises(ValueError, match="refuse full recompute"):
            stage_of(spec_with, letter, "full", {})
