"""The report page in Chromium: it draws without errors, its numbers are those of `estimate --json`, and keys reach everything."""

import json

import pytest
from conftest import REPORTS
from playwright.sync_api import expect


def estimate(name: str) -> dict:
    return json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8"))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plan", "one-rank", "megatron", "hostile"])
def test_the_page_draws_without_errors_and_loads_nothing(opened, name, scheme):
    found = opened(name, scheme)
    assert found.page.locator("section h2").count() >= 4
    assert found.page.locator("canvas").count() == 2
    assert found.page.locator("#memory [role=img].bar span").count() >= found.page.locator("#memory tbody tr").count()
    assert "[object" not in found.page.locator("body").inner_text()
    assert found.errors == []
    assert [url for url in found.requests if not url.startswith("file:")] == []
    assert len(found.requests) == 1


def test_the_numbers_are_those_of_the_json(opened):
    page, document = opened("plan").page, estimate("plan")
    rows = page.locator("#memory tbody tr")
    assert rows.count() == len(document["ranks"])
    for row, rank in zip(rows.all(), document["ranks"], strict=True):
        cells = [cell.inner_text() for cell in row.locator("td").all()]
        values = [cell.get_attribute("data-value") for cell in row.locator("td").all()]
        columns = list(rank["columns"].values())
        assert cells[2:4] == [gib(rank["peak_bytes"]), gib(rank["headroom_bytes"])]
        assert cells[6:-1] == [gib(num_bytes) for num_bytes in columns]
        assert values[6:-1] == [str(num_bytes) for num_bytes in columns]
        assert cells[-1] == f"{rank['parameters']:,}"
    assert ("fits" if document["fits"] else "does not fit") in page.locator("#verdict").inner_text()


def test_a_table_sorts_both_ways(opened):
    page = opened("plan").page
    head = page.locator("#memory th", has_text="activations").first
    at = head.evaluate("node => node.cellIndex")

    def values() -> list[int]:
        return [int(row.locator("td").nth(at).get_attribute("data-value")) for row in page.locator("#memory tbody tr").all()]

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
    assert (row, column) == (2, 3)
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    assert "usable − peak" in dialog.inner_text()
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    assert page.evaluate("document.activeElement.closest('td').cellIndex") == 3


def test_the_formula_of_a_column_is_that_of_explain(opened):
    page = opened("plan").page
    index = page.locator("#memory th", has_text="gradients").first.evaluate("node => node.cellIndex")
    page.locator("#memory tbody tr").first.locator("td").nth(index).locator("button").click()
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
    assert colours["dark"] == ["rgb(16, 22, 29)", "rgb(230, 237, 244)"]


def test_a_screen_reader_finds_names_roles_and_tables(opened):
    page = opened("plan").page
    assert page.get_by_role("main").count() == page.get_by_role("navigation").count() == 1
    for name in ("Memory by rank", "Memory over time", "Timeline", "Layers and cuts", "Time of a step"):
        assert page.get_by_role("region", name=name, exact=True).count() == 1
    assert page.locator("[role=img]:not([aria-label])").count() == 0
    assert page.locator("button, select").evaluate_all("nodes => nodes.every((node) => node.innerText || node.labels)")
    page.locator("summary", has_text="Table: the actions of a rank").click()
    # The rows are made when the element has told of its opening, which is after the click has returned.
    expect(page.get_by_role("table", name="Actions of pp 0").locator("tbody tr")).not_to_have_count(0)
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
    assert page.locator("#why-not tbody tr").count() == len(document["why_not"])
    assert found.errors == []
    assert len(found.requests) == 1
