"""A headless Chromium for the report page: Debian's, or that of the variable CHROMIUM. Without one the lane fails and says so."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[2]
REPORTS = Path(os.environ["MEGAPLAN_REPORTS"])
"""Folder of the pages under test, which `scripts/test_browser.sh` has megaplan write."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-headless-shell")
    if path is None:
        pytest.fail("no Chromium: apt-get install chromium, or CHROMIUM=/path/to/chromium make test-browser")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=300_000)
        yield launched
        launched.close()


@dataclass
class Opened:
    """A page with what went wrong on it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def opened(browser):
    """`opened("plan", scheme="dark")`: the page in a new context, its errors and requests."""
    contexts = []

    def call(name: str, scheme: str = "light") -> Opened:
        context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900}, offline=True)
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.set_default_timeout(120_000)
        found.page.on("console", lambda message: message.type in ("error", "warning") and found.errors.append(message.text))
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("dialog", lambda dialog: (found.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))
        found.page.goto((REPORTS / f"{name}.html").as_uri(), timeout=120_000)
        return found

    yield call
    for context in contexts:
        context.close()
