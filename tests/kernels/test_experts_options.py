"""Experts with biases, geglu and the clamped swiglu: values and gradients against rows computed one by one, what is kept, and fakes."""

from typing import Any

import pytest
import torch
from op_checks import saved_by
from torch import Tensor
from torch.nn import functional

from megakernels import combine, dispatch, experts, geglu, routed_experts

COUNTS, WIDTH, HIDDEN = [3, 0, 2, 4], 6, 5
LIMIT = 0.7
CASES = {
    "geglu": {"activation": "geglu"},
    "biases": {"activation": "swiglu", "biases": True},
    "clamped": {"activation": "swiglu", "biases": True, "limit": LIMIT},
    "two matrices": {"activation": "relu2", "biases": True},
    "geglu biases": {"activation": "geglu", "biases": True},
}
EACH = pytest.mark.parametrize("case", CASES)


def inputs(case: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(4)
    count, rows = len(COUNTS), sum(COUNTS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    gated, biased = CASES[case]["activation"] != "relu2", "biases" in CASES[case]
    return {
        "x": normal(rows, HIDDEN),
        "weights": normal(rows, 1).to(torch.float64 if dtype is torch.float64 else torch.float32).detach().requires_grad_(),
        "gate": normal(count, WIDTH, HIDDEN) if gated else None,
        "up": normal(count, WIDTH, HIDDEN),
        "down": normal(count, HIDDEN, WIDTH),
        "gate_bias": normal(count, WIDTH) if gated and biased else None,
        "up_bias": normal(count, WIDTH) if biased else None,
        "down_bias": normal(count, HIDDEN) if biased else None,
    }


ROWS = torch.tensor([4, 1, 7, 0, 2, 8, 3, 5, 6], dtype=torch.int32)


def run(case: str, given: dict[str, Any]) -> Tensor:
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    biases = {name: given[name] for name in ("gate_bias", "up_bias", "down_bias")}
    return experts(
        given["x"], given["weights"], ROWS, counts, given["gate"], given["up"], given["down"], CASES[case]["activation"], **biases,
        limit=CASES[case].get("limit"),
    )  # fmt: skip


def exact(case: str, given: dict[str, Any]) -> Tensor:
    """Every row by its own expert, by autograd."""
    owners = [expert for expert, count in enumerate(COUNTS) for _ in range(count)]
    found = []
    for row, expert in enumerate(owners):

        def product(name: str, inner: Tensor, expert: int = expert) -> Tensor:
            bias = given[f"{name}_bias"]
            return given[name][expert] @ inner + (0 if bias is None else bias[expert])

        up = product("up", given["x"][row])
        match CASES[case]["activation"], CASES[case].get("limit"):
            case "geglu", _:
                hidden = functional.gelu(product("gate", given["x"][row]), approximate="tanh") * up
            case "relu2", _:
                hidden = up.relu() ** 2
            case _, None:
                hidden = functional.silu(product("gate", given["x"][row])) * up
            case _, limit:
                gate = product("gate", given["x"][row]).clamp(max=limit)
                hidden = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1)
        found.append(given["weights"].flatten()[ROWS[row]] * product("down", hidden))
    return torch.stack(found)


@EACH
def test_values_and_gradients_are_those_of_rows_one_by_one(case: str) -> None:
    given = inputs(case)
    wanted = [tensor for tensor in given.values() if tensor is not None]
    found, expected = run(case, given), exact(case, given)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    pairs = zip(torch.autograd.grad(found, wanted, cotangent), torch.autograd.grad(expected, wanted, cotangent), strict=True)
    for gradient, value in pairs:
        torch.testing.assert_close(gradient, value, rtol=1e-10, atol=1e-12)


def test_rows_are_clamped_on_both_sides() -> None:
    """Else the gradients' zeros would not be tested."""
    given = inputs("clamped")
    up = given["x"] @ given["up"][0].T  # type: ignore[index, operator, union-attr]
    assert (up > LIMIT).any()
    assert (up < -LIMIT).any()


@EACH
def test_two_products_are_kept_whatever_is_added_to_them(case: str) -> None:
    given = inputs(case, torch.bfloat16)
    _, packed = saved_by(lambda: run(case, given))
    arrays = [tuple(tensor.shape) for tensor in packed if tuple(tensor.shape) == (sum(COUNTS), WIDTH)]
    assert len(arrays) == (1 if given["gate"] is None else 2)


@EACH
def test_routed_experts_have_the_same_options(case: str) -> None:
    given, counts = inputs(case), torch.tensor(COUNTS, dtype=torch.int32)
    front: list[Any] = [given["weights"], ROWS, counts, given["gate"], given["up"], given["down"], CASES[case]["activation"]]
    options: dict[str, Any] = {name: given[name] for name in ("gate_bias", "up_bias", "down_bias")} | {"limit": CASES[case].get("limit")}
    x: Any = given["x"]
    together = routed_experts(x, *front, **options)
    torch.testing.assert_close(together, combine(experts(dispatch(x, ROWS, 1), *front, **options), ROWS, 1), rtol=1e-12, atol=1e-13)


@EACH
def test_fakes_and_schemas_are_right(case: str) -> None:
    given, counts = inputs(case, torch.float32), torch.tensor(COUNTS, dtype=torch.int32)
    gated = given["gate"] is not None
    front = (given["x"], given["weights"], ROWS, counts)
    ours = {name: given[name] for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")}
    named = [tensor for name, tensor in ours.items() if gated or not name.startswith("gate")]
    arguments = (*front, *named, CASES[case]["activation"], *((CASES[case].get("limit"),) if gated else ()))
    op = torch.ops.megakernels.experts_gated if gated else torch.ops.megakernels.experts
    assert set(torch.library.opcheck(op.default, arguments).values()) == {"SUCCESS"}


def test_what_does_not_fit_is_refused() -> None:
    given, counts = inputs("biases"), torch.tensor(COUNTS, dtype=torch.int32)
    front: list[Any] = [given["x"], given["weights"], ROWS, counts, given["gate"], given["up"], given["down"]]
    with pytest.raises(ValueError, match="biases must be"):
        run("biases", {**given, "up_bias": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="swiglu alone has a limit"):
        experts(*front, "geglu", limit=1.0)
    with pytest.raises(ValueError, match="geglu: gate and up"):
        geglu(torch.ones(2), torch.ones(3))
