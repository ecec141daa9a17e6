"""A real Chromium for tests: the page as a person's browser shows it, and everything that it complains about."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@dataclass
class Tab:
    """An open page, what it asked for and what it complained about."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def until(self, condition: str, seconds: float = 120.0) -> None:
        """Wait for something to be true on the page; asked from outside, as the page's policy allows no eval."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"did not come true: {condition}; complaints: {self.complaints}"
            self.page.wait_for_timeout(50)

    def only_asked(self, url: str) -> bool:
        """Whether no request left the origin."""
        ours = urlsplit(url)[:2]
        return bool(self.requests) and all(
            urlsplit(asked)[:2] == ours for asked in self.requests if not asked.startswith("data:")
        )


@contextmanager
def opened(url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Tab]:
    """The page at an address, in a browser of its own; skips where there is no Chromium."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("no chromium in PATH: install it (apt-get install chromium) to test the live page")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=FLAGS, timeout=120_000)
        try:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.set_default_timeout(120_000)
            tab = Tab(page)
            page.on("request", lambda request: tab.requests.append(request.url))
            page.on("console", lambda said: tab.complaints.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: tab.complaints.append(str(error)))
            page.goto(url)
            yield tab
        finally:
            browser.close()
