"""A headless Chromium of this machine for tests of pages, driven by Playwright.

Tests use the fixture `show` of tests/conftest.py. They wait for what a page shows, with locators
and `expect`, and never for a time.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")

#: Without a sandbox, which root and containers do not have; shared memory is small in containers.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]

#: Milliseconds after which something does not happen. The machine may be busy.
LIMIT = 120_000


def program() -> str:
    """Chromium's path. Skips the test where there is none; in CI, fails it."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("CI") == "true":
        pytest.fail("CI has no Chromium: .ci/run installs it")
    if found is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    return found


@dataclass
class Shown:
    """A page, and what happened in it since it was opened."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """What the console was told: errors, warnings, refusals by the page's policy."""
    requests: list[str] = field(default_factory=list)
    """Addresses that were asked for."""


@contextlib.contextmanager
def started(home: Path) -> Iterator[Browser]:
    """The browser. Args:     home: an empty folder for what it writes."""
    path, env = program(), {**os.environ, "HOME": str(home)}
    expect.set_options(timeout=LIMIT)
    with sync_playwright() as playwright:
        launch = playwright.chromium.launch
        browser = launch(executable_path=path, args=FLAGS, env=env, timeout=LIMIT)
        try:
            yield browser
        finally:
            browser.close()


def open_page(
    browser: Browser,
    file: Path,
    width: int,
    height: int = 900,
    *,
    dark: bool = False,
    fragment: str = "",
    script: bool = True,
) -> Shown:
    """Show a file, and return once it is loaded.

    Args:     width, height: of the window; a narrow one is a phone's. fragment: what follows the
              file in its address, from # on. script: whether its script runs.
    """
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        is_mobile=width < 500,
        java_script_enabled=script,
    )
    context.set_default_timeout(LIMIT)
    shown = Shown(context.new_page())
    shown.page.on("console", lambda message: shown.complaints.append(message.text))
    shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    shown.page.on("request", lambda request: shown.requests.append(request.url))
    shown.page.goto(file.as_uri() + fragment, wait_until="load")
    return shown
