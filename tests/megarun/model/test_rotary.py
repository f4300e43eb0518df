"""Rotary frequencies that are scaled for a longer context, against values of transformers 5.23.0's `ROPE_INIT_FUNCTIONS`."""

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from megaplan.spec.models import RopeScaling
from megarun.model.rotary import rotary_frequencies, rotary_table

pytestmark = pytest.mark.runtime
WIDTH, PAIRS = 64, [0, 8, 10, 12, 14, 16, 18, 20, 31]
LLAMA = {"kind": "llama3", "factor": 8.0}
DEEPSEEK = {"kind": "yarn", "factor": 40.0, "original_seq_length": 4096, "attention_factor": 1.0}
GPT_OSS = {"kind": "yarn", "factor": 32.0, "original_seq_length": 4096, "truncate": False}
KIMI = {"kind": "yarn", "factor": 32.0, "original_seq_length": 4096, "beta_fast": 1.0, "beta_slow": 1.0, "attention_factor": 1.0}
EXPECTED = [
    (LLAMA, 500_000.0, 1.0, [1.0, 0.03760603, 0.01656044, 0.007292665, 0.003211446, 0.000524846, 7.784655e-05, 3.428102e-05, 3.767323e-07]),
    (DEEPSEEK, 10_000.0, 1.0, [1.0, 0.1, 0.05623413, 0.02687936, 0.01244796, 0.0055, 0.002249365, 0.0007905694, 3.333804e-06]),
    (GPT_OSS, 10_000.0, 1.3465736, [1.0, 0.1, 0.05623413, 0.02773594, 0.0127357, 0.005552754, 0.002217703, 0.0007382769, 4.167255e-06]),
    (KIMI, 50_000.0, 1.0, [1.0, 0.06687403, 0.03400728, 0.01729363, 0.008794287, 0.004472136, 0.002274204, 3.614047e-05, 8.764413e-07]),
]


def scaling_of(section: dict[str, Any]) -> Any:
    return TypeAdapter(RopeScaling).validate_python(section)


@pytest.mark.parametrize(("section", "theta", "factor", "expected"), EXPECTED, ids=["llama3", "yarn", "yarn-whole", "yarn-one-step"])
def test_frequencies_are_those_of_transformers(section: dict[str, Any], theta: float, factor: float, expected: list[float]) -> None:
    scaling, device = scaling_of(section), torch.device("cpu")
    found = rotary_frequencies(WIDTH, theta, device, scaling)
    torch.testing.assert_close(found[PAIRS], torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    table = rotary_table(torch.tensor([0, 7]), WIDTH, theta, device, scaling)
    torch.testing.assert_close(table.cos[0], torch.full((WIDTH // 2,), factor), rtol=1e-6, atol=0)
    torch.testing.assert_close(table.sin[1], (factor * torch.sin(7 * found)).float(), rtol=1e-6, atol=1e-7)


def test_one_factor_divides_all_frequencies() -> None:
    device = torch.device("cpu")
    divided = rotary_frequencies(WIDTH, 1e4, device, scaling_of({"kind": "linear", "factor": 3.0}))
    torch.testing.assert_close(divided * 3, rotary_frequencies(WIDTH, 1e4, device))


@pytest.mark.parametrize(("ends", "theta"), [(1.0, 500_000.0), (4.0, 10_000.0)])
def test_equal_factors_of_llama3_are_a_step(ends: float, theta: float) -> None:
    """A frequency is kept or divided, as transformers does: it divides by the factors' difference for those between them alone."""
    device = torch.device("cpu")
    section = {"kind": "llama3", "factor": 16.0, "low_freq_factor": ends, "high_freq_factor": ends}
    found, plain = rotary_frequencies(WIDTH, theta, device, scaling_of(section)), rotary_frequencies(WIDTH, theta, device)
    few = 2 * torch.pi / plain > 8192 / ends
    torch.testing.assert_close(found, torch.where(few, plain / 16.0, plain))
    assert 0 < few.sum() < len(few)
