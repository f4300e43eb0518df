"""The page of well-known models matches the command's output."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT, PAGE = ROOT / "scripts/models_page.py", ROOT / "docs/reference/models.md"


@pytest.mark.skipif(not SCRIPT.is_file(), reason="runs beside the sources")
def test_the_page_of_well_known_models_is_up_to_date() -> None:
    """Remedy: scripts/models_page.py."""
    script = runpy.run_path(str(SCRIPT))
    assert len(script["MODELS"]) == len(PUBLISHED)
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"]()


PUBLISHED = {
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,
    "openai/gpt-oss-20b": 20_914_757_184,
    "zai-org/GLM-4.5-Air": 106_852_245_504,
    "google/gemma-3-1b-pt": 999_885_952,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "nvidia/Nemotron-H-8B-Base-8K": 8_100_852_736,
    "ibm-granite/granite-4.0-h-tiny": 6_939_037_248,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Qwen/Qwen3.5-27B": 26_895_998_464,
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": 49_122_675_072,
    "ai21labs/AI21-Jamba-1.5-Mini": 51_570_323_328,
    "LiquidAI/LFM2-8B-A1B": 8_339_929_856,
    "LiquidAI/LFM2-1.2B": 1_170_340_608,
    "allenai/Olmo-Hybrid-7B": 7_430_870_688,
    "deepseek-ai/DeepSeek-V3.2": 671_877_929_216,
    "zai-org/GLM-5": 743_911_199_232,
    "google/gemma-3-27b-pt": 27_009_346_304,
    "openai/gpt-oss-120b": 116_829_156_672,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "tiiuae/Falcon-H1-0.5B-Base": 521_411_104,
}
"""Parameters of the models without prediction modules, as transformers builds them and their authors publish them."""


@pytest.mark.skipif(not SCRIPT.is_file(), reason="runs beside the sources")
def test_parameters_are_the_published_ones() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count("|") == 7 and "`--set" in line]
    assert {cells[0].removeprefix("| "): int(cells[2].replace(",", "")) for cells in rows} == PUBLISHED
