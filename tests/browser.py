"""A real browser for tests of pages: finds Chromium, opens files in it, keeps what it complains of.

Playwright drives the Chromium that is installed; it downloads none. Where there is none, tests skip.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# No sandbox: root has none in a container. The files opened are the tests' own.
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")

CUT = """() => [...document.querySelectorAll("body *")]
  .filter((e) => getComputedStyle(e).maxHeight !== "none" && e.scrollHeight > e.clientHeight + 1)
  .map((e) => e.className)"""
"""Classes of elements whose height has a limit that cuts what is in them."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser; skips the test where none is installed."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: expected one of {', '.join(NAMES)} on PATH (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """A page in the browser, and what happened on it."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    """Errors, warnings and anything else said on the console."""
    requests: list[str] = field(default_factory=list)
    """What was asked for, but for data in the page itself."""

    def tip(self) -> dict[str, str]:
        """The tooltip: its headline ("what") and the line below ("where")."""
        self.page.wait_for_selector(".tip.on")
        lines = {name: self.page.locator(f".tip .{name}") for name in ("what", "where")}
        return {name: line.first.inner_text() for name, line in lines.items() if line.count()}

    def hover(self, locator: Any, x: float, y: float) -> dict[str, str]:
        """Point at a place of an element, in shares of its width and height; the tooltip there.

        What scrolled is told late, and hides the tooltip: so the hand does not stay quite still.
        """
        locator.scroll_into_view_if_needed()
        # Of an element higher than the window that place comes into the middle.
        locator.evaluate(
            """(e, y) => {
              const box = e.getBoundingClientRect(), at = box.top + y * box.height;
              if (at < 0 || at > innerHeight) scrollBy({ top: at - innerHeight / 2, behavior: "instant" });
            }""",
            y,
        )
        box = locator.bounding_box()
        there = box["x"] + x * box["width"], box["y"] + y * box["height"]
        self.page.mouse.move(*there)
        for turn in range(50):
            self.page.wait_for_timeout(100)
            if self.page.locator(".tip.on").count():
                break
            self.page.mouse.move(there[0] + turn % 2 * 0.5, there[1])
        return self.tip()


@contextmanager
def opened(browser: Any, file: Path, *, width: int = 1400, dark: bool = False) -> Iterator[Opened]:
    """The page of a file, drawn."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    context.set_default_timeout(60_000)  # on a busy machine
    found = Opened(context.new_page())
    found.page.on("console", lambda message: found.complaints.append(f"{message.type}: {message.text}"))
    found.page.on("pageerror", lambda error: found.complaints.append(f"exception: {error}"))
    found.page.on(
        "request",
        lambda request: None if request.url.startswith("data:") else found.requests.append(request.url),
    )
    found.page.goto(file.as_uri())
    found.page.wait_for_selector("html[data-ready]")
    try:
        yield found
    finally:
        context.close()
