"""A share of the cases of long tests for every run; the rest joins the slow set."""

from collections import defaultdict
from collections.abc import Iterable
from hashlib import blake2s
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ONE_IN = {
    "kernels/compiled/test_sizes.py": 3,
    "kernels/interpreted/check_activation.py": 8,
    "kernels/interpreted/check_attention.py": 7,
    "kernels/interpreted/check_attention_bent.py": 2,
    "kernels/interpreted/check_causal_conv1d.py": 5,
    "kernels/interpreted/check_chosen_attention.py": 8,
    "kernels/interpreted/check_cross_entropy.py": 6,
    "kernels/interpreted/check_experts_options.py": 18,
    "kernels/interpreted/check_fp8_experts.py": 2,
    "kernels/interpreted/check_gated_conv1d.py": 3,
    "kernels/interpreted/check_gated_delta.py": 3,
    "kernels/interpreted/check_indexed_attention.py": 8,
    "kernels/interpreted/check_m2rnn.py": 12,
    "kernels/interpreted/check_mamba3.py": 9,
    "kernels/interpreted/check_moe.py": 5,
    "kernels/interpreted/check_rms_norm.py": 3,
    "kernels/interpreted/check_rope.py": 2,
    "kernels/interpreted/check_scratch.py": 3,
    "kernels/interpreted/check_scratch_delta.py": 3,
    "kernels/interpreted/check_scratch_mamba3.py": 3,
    "kernels/interpreted/check_scratch_selective.py": 3,
    "kernels/interpreted/check_selective_scan.py": 8,
    "kernels/interpreted/check_ssd.py": 28,
    "kernels/test_op_contract.py": 3,
    "kernels/test_op_values.py": 3,
    "megaplan/importers/test_pinned_imports.py": 2,
    "megaplan/importers/test_recorded_forms.py": 4,
    "megaplan/importers/test_recording.py": 6,
    "megaplan/partition/test_fitting.py": 2,
    "megaplan/search/test_exhaustive.py": 3,
    "megaplan/search/test_pinned_searches.py": 2,
    "megarun/checkpoint/test_checkpoint.py": 3,
    "megarun/faults/test_faults.py": 3,
    "megarun/huggingface/test_convert.py": 6,
    "megarun/model/test_saved.py": 3,
    "megarun/parity/test_bad_steps.py": 2,
    "megarun/parity/test_options.py": 3,
    "megarun/parity/test_parity.py": 9,
    "megarun/parity/test_resume.py": 5,
    "megarun/parity/test_routing_extremes.py": 3,
    "megarun/trace/test_attention_peaks.py": 4,
    "megarun/trace/test_depths.py": 3,
    "megarun/trace/test_expert_peaks.py": 14,
    "megarun/trace/test_hand_off.py": 6,
    "megarun/trace/test_lora.py": 6,
    "megarun/trace/test_low_precision.py": 6,
    "megarun/trace/test_matrix.py": 3,
    "megarun/trace/test_neutral.py": 2,
    "megarun/trace/test_options.py": 6,
    "megarun/trace/test_peaks.py": 3,
    "megarun/trace/test_rank.py": 10,
    "megarun/trace/test_relations.py": 2,
    "megarun/trace/test_shared_choices.py": 2,
    "megarun/trace/test_stage_outputs.py": 3,
    "oracle/test_ledger_vs_runtime.py": 5,
    "oracle/test_scan_ledger.py": 3,
    "oracle/test_tensor_ledger.py": 3,
}
"""n for each file, of which every run takes one case in n. Each covers a product: families, policies, layouts, sizes or dtypes."""
LONG = {
    "kernels/interpreted/check_attention.py": {"test_pieces_are_the_whole", "test_shipped_tiles"},
    "kernels/interpreted/check_causal_conv1d.py": {"test_more_positions_than_a_backward_program_takes"},
    "kernels/interpreted/check_chosen_attention.py": {"test_pieces_are_the_whole"},
    "kernels/interpreted/check_indexed_attention.py": {"test_pieces_are_the_whole", "test_rows_that_one_program_does_not_hold"},
    "kernels/interpreted/check_mamba3.py": {"test_fewer_segments_at_once_than_there_are", "test_pieces_are_the_whole"},
    "kernels/interpreted/check_side_embedding.py": {"test_programs_of_several_tiles_sum_all_elements"},
    "kernels/interpreted/check_ssd.py": {"test_any_decay", "test_several_tiles_of_a_chunk"},
}
"""Tests of each file that run in the slow set alone: a device takes milliseconds for each, the interpreter five seconds or more."""


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the other cases of these files' parametrised tests as slow.

    At least one case of every test stays, those in `LONG` excepted. The draw is by the cases' names: it is the same on every machine, and
    follows no parameter of a product.
    """
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        file = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        if (file in ONE_IN or file in LONG) and not item.get_closest_marker("slow"):
            cases[file, item.nodeid.partition("[")[0]].append(item)
    for (file, _), group in cases.items():
        group.sort(key=lambda item: blake2s(item.name.encode()).digest())
        kept = 0 if group[0].name.partition("[")[0] in LONG.get(file, ()) else -(-len(group) // ONE_IN.get(file, 1))
        for item in group[kept:]:
            item.add_marker(pytest.mark.slow)
