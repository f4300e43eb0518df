"""A share of the cases of long tests for every run; the rest joins the slow set."""

from collections import defaultdict
from collections.abc import Iterable
from hashlib import blake2s
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ONE_IN = {
    "kernels/interpreted/check_activation.py": 2,
    "kernels/interpreted/check_attention.py": 2,
    "kernels/interpreted/check_causal_conv1d.py": 2,
    "kernels/interpreted/check_chosen_attention.py": 2,
    "kernels/interpreted/check_cross_entropy.py": 2,
    "kernels/interpreted/check_experts_options.py": 2,
    "kernels/interpreted/check_indexed_attention.py": 2,
    "kernels/interpreted/check_moe.py": 2,
    "kernels/interpreted/check_rms_norm.py": 2,
    "kernels/test_op_contract.py": 2,
    "kernels/test_op_values.py": 2,
    "megaplan/importers/test_pinned_imports.py": 2,
    "megaplan/importers/test_pinned_launches.py": 2,
    "megaplan/importers/test_recorded_forms.py": 2,
    "megaplan/partition/test_fitting.py": 2,
    "megaplan/search/test_exhaustive.py": 2,
    "megaplan/search/test_pinned_searches.py": 2,
    "megarun/benchmarks/test_kernel_counts.py": 2,
    "megarun/benchmarks/test_plain_torch.py": 2,
    "megarun/huggingface/test_convert.py": 2,
    "megarun/trace/test_attention_peaks.py": 2,
    "megarun/trace/test_expert_peaks.py": 3,
    "megarun/trace/test_hand_off.py": 2,
    "megarun/trace/test_lora.py": 2,
    "megarun/trace/test_low_precision.py": 2,
    "megarun/trace/test_options.py": 2,
    "megarun/trace/test_rank.py": 2,
    "oracle/test_ledger_vs_runtime.py": 3,
    "oracle/test_tensor_ledger.py": 3,
}
"""n for each file, of which every run takes one case in n. Each covers a product: families, policies, layouts, sizes or dtypes."""


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the other cases of these files' parametrised tests as slow; at least one case of every test stays.

    The draw is by the cases' names: it is the same on every machine, and follows no parameter of a product.
    """
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        file = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        if file in ONE_IN and not item.get_closest_marker("slow"):
            cases[file, item.nodeid.partition("[")[0]].append(item)
    for (file, _), group in cases.items():
        group.sort(key=lambda item: blake2s(item.name.encode()).digest())
        for item in group[-(-len(group) // ONE_IN[file]) :]:
            item.add_marker(pytest.mark.slow)
