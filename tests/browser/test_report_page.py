"""The report page in Chromium: it draws without errors, its numbers are those of `estimate --json`, and keys reach everything."""

import json
import os
import re
from pathlib import Path

import pytest
from conftest import REPORTS
from playwright.sync_api import expect

SCREENSHOTS = Path(os.environ.get("MEGAPLAN_SCREENSHOTS") or REPORTS)
"""Folder of the guide's pictures; `MEGAPLAN_SCREENSHOTS=docs make test-browser` replaces those of the documentation."""
HEIGHTS = {1280: 1180, 390: 1400}
MAX_PICTURES = 600_000


def estimate(name: str) -> dict:
    return json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8"))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


def test_the_numbers_are_those_of_the_json(opened):
    page, document = opened("plan").page, estimate("plan")
    rows = page.locator("#memory tbody tr")
    assert rows.count() == len(document["ranks"])
    for row, rank in zip(rows.all(), document["ranks"], strict=True):
        cells = [cell.inner_text() for cell in row.locator("th, td").all()]
        values = [cell.get_attribute("data-value") for cell in row.locator("th, td").all()]
        used = [key for key in rank["columns"] if any(cells[key] for each in document["ranks"] for cells in each["cells"].values())]
        assert cells[2:4] == [gib(rank["peak_bytes"]), gib(rank["headroom_bytes"])]
        assert cells[5:-2] == [gib(rank["columns"][key]) for key in used]
        assert values[5:-2] == [str(rank["columns"][key]) for key in used]
        assert cells[-1] == f"{rank['parameters']:,}"
    assert ("Fits" if document["fits"] else "Does not fit") in page.locator("#verdict").inner_text()
    numbers = page.locator(".cards").first.inner_text()
    step = document["time"]
    assert f"{step['tokens_per_second_per_device']:,.0f}" in numbers
    assert f"{document['totals']['parameters']:,}" in numbers


def test_the_whole_run_is_that_of_megaplan_run(opened):
    page, found = opened("plan").page, json.loads((REPORTS / "run.json").read_text(encoding="utf-8"))
    text = page.locator(".cards").first.inner_text()
    assert f"Days to 2 T tokens\n{found['days']['value']:.0f}\n" in text
    assert "Cost\n" in text
    days = page.locator("#run tbody tr", has_text="Days").first.locator("td").first
    assert float(days.get_attribute("data-value")) == found["days"]["value"]


def test_the_page_of_a_post_training_plan_has_its_phases(opened):
    found = opened("post-training")
    document = json.loads((REPORTS / "rl.json").read_text(encoding="utf-8"))
    rows = found.page.get_by_role("table", name="Time of an iteration").locator("tbody tr")
    assert [float(row.locator("td").nth(1).get_attribute("data-value")) for row in rows.all()] == [
        phase["seconds"]["value"] for phase in document["times"]
    ]
    totals = found.page.get_by_role("table", name="Memory of the fullest device by phase, GiB").locator("tbody td:nth-child(2)")
    assert [int(cell.get_attribute("data-value")) for cell in totals.all()] == [phase["total_bytes"] for phase in document["memory"]]
    assert found.errors == []


def test_the_page_of_two_plans_has_their_difference(opened):
    found = opened("comparison")
    document = json.loads((REPORTS / "diff.json").read_text(encoding="utf-8"))
    rows = found.page.get_by_role("table", name="Bytes of all ranks together at their peaks").locator("tbody tr")
    values = [[int(cell.get_attribute("data-value")) for cell in row.locator("td").all()[:3]] for row in rows.all()]
    changed = [(each["before_bytes"], each["after_bytes"]) for each in document["columns"]]
    assert values == [[before, after, after - before] for before, after in changed]
    numbers = found.page.locator(".cards").first.inner_text()
    for side in ("before", "after"):
        assert f"{document['time'][side]['tokens_per_second_per_device']:,.0f}" in numbers
    assert found.page.get_by_role("table", name="Settings that differ").locator("tbody tr").count() >= len(document["inputs"])
    assert found.errors == []


CUT = """() => [...document.querySelectorAll('body *')].filter((node) => {
  const framed = node.parentElement.closest('.scroll, nav, svg, .u-wrap') || node.closest('dialog, .skip, noscript, script');
  const box = node.getBoundingClientRect(), style = getComputedStyle(node), spare = style.overflowX === 'visible' ? 1 : 0;
  if (framed || !box.width) return false;
  if (box.left < -1 || box.right > document.documentElement.clientWidth + 1) return true;
  if (style.display === 'inline' || node.matches('.scroll, nav, .bar, .meter')) return false;
  return node.clientWidth > 0 && node.scrollWidth > node.clientWidth + spare;
}).map((node) => `${node.tagName}.${node.className}: ${(node.innerText || '').slice(0, 80)}`)"""
"""Elements outside scrolling frames that are wider than their place, or that reach over the edge of the page."""
KEYS = re.compile(r"[a-z0-9]+_[a-z0-9_]+")
NAMES = "h1, h2, thead th, caption, dt, option, summary, .legend, .lead, .who, #memory tbody th, #step-time tbody th, #run tbody th"


@pytest.mark.parametrize("name", ["plan", "one-rank", "megatron", "hostile", "search", "comparison", "post-training"])
def test_the_page_draws_without_errors_in_both_schemes_and_widths_and_cuts_nothing(opened, name):
    found = opened(name)
    page = found.page
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(50)  # pictures follow the width in a later frame
        assert page.evaluate(CUT) == []
        assert page.evaluate("[...document.querySelectorAll('.scroll')].every((node) => node.getBoundingClientRect().right <= innerWidth)")
    assert page.locator("section h2").count() >= 3
    assert page.locator("canvas").count() == (0 if name in ("search", "comparison") else 2)
    assert page.locator("#memory [role=img].bar span").count() >= page.locator("#memory tbody tr").count()
    assert [text for text in page.locator(NAMES).all_inner_texts() if KEYS.search(text)] == []
    assert "[object" not in page.locator("body").inner_text()
    assert found.errors == []
    assert [url for url in found.requests if not url.startswith("file:")] == []
    assert len(found.requests) == 1


def test_the_first_column_and_the_heads_stay_while_a_frame_scrolls(opened):
    page = opened("plan").page
    page.set_viewport_size({"width": 390, "height": 900})
    frame = page.locator("#memory .scroll")
    left = frame.evaluate("node => { node.scrollLeft = 400; return node.querySelector('tbody th').getBoundingClientRect().left; }")
    assert frame.evaluate("node => node.scrollLeft") == 400
    assert left == pytest.approx(frame.evaluate("node => node.getBoundingClientRect().left"), abs=2)


def test_the_screenshots_of_the_guide(opened):
    page = opened("plan").page
    total = 0
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "dark"), (390, "light")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(100)
        picture = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": HEIGHTS[width]})
        total += len(picture)
        (SCREENSHOTS / f"report-{scheme}{'' if width == 1280 else '-phone'}.png").write_bytes(picture)
    assert total < MAX_PICTURES


def test_the_page_prints_without_its_controls(opened):
    page = opened("plan").page
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    assert page.locator(".controls").first.is_hidden()
    assert page.locator("#memory table").evaluate("node => getComputedStyle(node.parentElement).overflow") == "visible"


def test_a_table_sorts_both_ways(opened):
    page = opened("plan").page
    head = page.locator("#memory thead th", has_text="Blocks").first
    at = head.evaluate("node => node.cellIndex")

    def values() -> list[int]:
        return [int(row.locator("th, td").nth(at).get_attribute("data-value")) for row in page.locator("#memory tbody tr").all()]

    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert values() == sorted(values(), reverse=True)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert values() == sorted(values())


def test_keys_reach_a_number_its_formula_and_return(opened):
    page = opened("plan").page
    buttons = page.locator("#memory tbody td button")
    assert [button.get_attribute("tabindex") for button in buttons.all()].count("0") == 1
    buttons.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    row, column = page.evaluate("[document.activeElement.closest('tr').rowIndex, document.activeElement.closest('td').cellIndex]")
    assert (row, column) == (3, 3)  # after two rows of heads
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    assert "usable − peak" in dialog.inner_text()
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    assert page.evaluate("document.activeElement.closest('td').cellIndex") == 3


def test_the_formula_of_a_column_is_that_of_explain(opened):
    page = opened("plan").page
    index = page.locator("#memory thead th", has_text="Gradients").first.evaluate("node => node.cellIndex")
    page.locator("#memory tbody tr").first.locator("th, td").nth(index).locator("button").click()
    text = page.locator("dialog[open]").inner_text()
    assert "Whole gradients while microbatches accumulate" in text
    assert f"{next(iter(estimate('plan')['ranks']))['columns']['gradients_bytes']:,}" in text


def test_the_timeline_zooms_by_keys_and_both_pictures_follow(opened):
    page = opened("plan").page
    assert page.locator("#timeline .u-axis, #timeline canvas").count() > 0
    box = page.locator("#timeline .plot")
    before = box.screenshot(), page.locator("#over-time .plot").screenshot()
    box.focus()
    page.keyboard.press("+")
    for _ in range(50):  # both are drawn in a later frame
        page.wait_for_timeout(100)
        after = box.screenshot(), page.locator("#over-time .plot").screenshot()
        if before[0] != after[0] and before[1] != after[1]:
            break
    assert before[0] != after[0]
    assert before[1] != after[1]
    page.keyboard.press("0")


def test_colours_follow_the_scheme(opened):
    colours = {}
    for scheme in ("light", "dark"):
        page = opened("plan", scheme).page
        colours[scheme] = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert colours["light"] == ["rgb(255, 255, 255)", "rgb(16, 36, 58)"]
    assert colours["dark"] == ["rgb(15, 21, 27)", "rgb(230, 237, 244)"]


def test_a_screen_reader_finds_names_roles_and_tables(opened):
    page = opened("plan").page
    assert page.get_by_role("main").count() == page.get_by_role("navigation").count() == 1
    for name in ("Memory by rank", "Memory over time", "Timeline", "Layers and cuts", "Time of a step"):
        assert page.get_by_role("region", name=name, exact=True).count() == 1
    assert page.locator("[role=img]:not([aria-label])").count() == 0
    assert page.locator("button, select").evaluate_all("nodes => nodes.every((node) => node.innerText || node.labels)")
    page.locator("summary", has_text="Table: the actions of a rank").click()
    # The rows are made when the element has told of its opening, which is after the click has returned.
    expect(page.get_by_role("table", name="Actions of PP 0").locator("tbody tr")).not_to_have_count(0)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== document.body")


def test_hostile_text_stays_text(opened):
    page = opened("hostile").page
    assert "<img src=x onerror=alert(1)>" in page.locator("header").inner_text()
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_search_names_a_layout_that_is_pointed_at(opened, scheme):
    found, document = opened("search", scheme), estimate("search")
    page, rows = found.page, document["best"]
    points = page.locator("#layouts circle")
    assert points.count() == page.locator("#rows tbody tr").count() == len(rows)
    points.nth(1).focus()
    assert page.locator("#layouts .status").inner_text().startswith("row 2: ")
    page.keyboard.press("Enter")
    assert f"--set 'mesh.pp={rows[1]['mesh']['pp']}'" in page.locator("#explanation").inner_text()
    page.keyboard.press("Escape")
    steps = [float(cell.get_attribute("data-value")) for cell in page.locator("#rows tbody td:nth-child(2)").all()]
    assert steps == [row["step_seconds"] for row in rows]
    assert page.title() == f"{document['spec']}, search on 4 devices · megaplan"
    assert page.locator("#why-not tbody tr").count() == len(document["why_not"])
    assert found.errors == []
    assert len(found.requests) == 1
