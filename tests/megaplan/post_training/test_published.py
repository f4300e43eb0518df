"""The page of published post-training: its rows, and their errors."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from rl.run import NEAR_MEMORY, NEAR_TIME, PAGE, data, iterations, memory  # noqa: E402


def test_the_page_has_every_published_row() -> None:
    found, text = data(), PAGE.read_text(encoding="utf-8")
    assert len(found["iterations"]) >= 10
    assert all(f"{row['seconds']:g}" in text for row in found["iterations"])
    assert all(row["name"] in text for row in found["memory"])
    assert all(row["source"] for row in found["memory"])


def test_every_published_size_is_near() -> None:
    assert len(memory()) >= 12
    assert all(abs(each.error) <= NEAR_MEMORY for each in memory())


def test_seven_in_ten_iterations_are_near_and_most_of_those_that_are_in_no_fit() -> None:
    found = iterations()
    for among, share in ((found, 0.7), ([each for each in found if not each.fitted], 0.5)):
        assert sum(abs(each.error) <= NEAR_TIME for each in among) >= share * len(among)


def test_other_publications_of_the_fitted_framework_are_near_and_all_are_on_the_page() -> None:
    found, text = iterations("others"), PAGE.read_text(encoding="utf-8")
    assert all(each.row["source"] in text for each in found)
    nemo = [each for each in found if each.row["loop"].startswith("NeMo-RL")]
    assert sum(abs(each.error) <= NEAR_TIME for each in nemo) >= 0.7 * len(nemo)
