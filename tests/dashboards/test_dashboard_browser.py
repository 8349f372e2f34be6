"""The dashboard in a real browser, light and dark; screenshots are kept in tests/artifacts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

playwright = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.browser

OPERATOR_KEY, VIEWER_KEY = "operator-key-of-the-tests", "viewer-key-of-the-tests"
ARTIFACTS = Path(__file__).parents[1] / "artifacts"
CHROMIUM = os.environ.get("QUAVER_TEST_CHROMIUM", "/usr/bin/chromium")
PAGES = {"": "Live", "request": "Request", "tiers": "KV tiers", "chaos": "Chaos"}


@pytest.fixture
def site(recorded_engine: Any, tmp_path: Path) -> Iterator[str]:
    """A dashboard process as users start it, away from the checkout."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "dashboard.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "dashboards", f"--server.port={port}"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for_health(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(20)
    assert "Traceback" not in log.read_text()


def wait_for_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/_stcore/health").text == "ok":
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    pytest.fail(f"no healthy dashboard: {log.read_text()}")


@pytest.fixture
def browser() -> Iterator[Any]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser at {CHROMIUM}; set QUAVER_TEST_CHROMIUM")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield chromium
        chromium.close()


def settle(page: Any) -> None:
    """Wait until the page is drawn: no skeleton is left and every chart has its picture."""
    page.wait_for_function(
        """() => {
            const all = (name) => [...document.querySelectorAll(`[data-testid="${name}"]`)];
            const drawn = all("stVegaLiteChart").every((chart) => chart.querySelector("svg, canvas"));
            return document.querySelector("h1") && all("stSkeleton").length === 0 && drawn;
        }""",
        timeout=60_000,
    )
    page.wait_for_timeout(2000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_in_both_themes(recorded_engine: Any, site: str, browser: Any, scheme: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1400, "height": 1850})
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    chosen = recorded_engine.answers["detail"]["request"]["request_id"]
    for path, title in PAGES.items():
        page.goto(f"{site}/{path}" + (f"?id={chosen}" if path == "request" else ""))
        settle(page)
        assert page.locator("h1").inner_text() == title
        assert page.locator('[data-testid="stException"]').count() == 0
        assert page.locator('[data-testid="stAlertContentError"]').count() == 0
        page.screenshot(path=ARTIFACTS / f"dashboard-{path or 'live'}-{scheme}.png")
    background = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 21, 28)"}[scheme]
    outside = {
        url for url in asked if not url.startswith((site, site.replace("http", "ws"), "data:", "blob:"))
    }
    assert not outside, "the dashboard is to be self-contained"
    context.close()


def test_a_fault_is_started_by_its_typed_name_and_halted(
    recorded_engine: Any, site: str, browser: Any
) -> None:
    recorded_engine.calm()
    page = browser.new_page(viewport={"width": 1400, "height": 1300})
    page.goto(f"{site}/chaos")
    settle(page)
    key = page.get_by_label("Operator key", exact=True)
    key.fill(OPERATOR_KEY)
    key.press("Enter")
    ttl = page.get_by_label("Duration, seconds (required)")
    ttl.fill("60")
    ttl.press("Enter")
    page.get_by_role("button", name="Start …").click(timeout=20_000)
    dialog = page.get_by_role("dialog")
    confirm = dialog.get_by_role("button", name="Start", exact=True)
    assert confirm.is_disabled()
    name = dialog.get_by_label("to confirm")
    name.press_sequentially(recorded_engine.answers["chaos"]["kinds"][0]["kind"])
    page.screenshot(path=ARTIFACTS / "dashboard-chaos-confirm.png")
    playwright.expect(confirm).to_be_enabled(timeout=20_000)
    confirm.click()
    playwright.expect(page.get_by_text("1 fault in force")).to_be_visible(timeout=20_000)
    page.screenshot(path=ARTIFACTS / "dashboard-chaos-running.png")
    page.get_by_role("button", name="HALT ALL").click()
    playwright.expect(page.get_by_text("Halted", exact=True)).to_be_visible(timeout=20_000)
    assert [sent[1] for sent in recorded_engine.sent] == ["/quaver/chaos/faults", "/quaver/chaos/halt"]
    assert OPERATOR_KEY not in page.url
    page.close()


def test_a_row_of_the_table_leads_to_its_request(site: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 2200})
    page.goto(site)
    settle(page)
    table = page.get_by_test_id("stDataFrame").last
    table.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    box = table.bounding_box()
    page.mouse.click(box["x"] + 16, box["y"] + 50)
    playwright.expect(page.locator("h1")).to_have_text("Request", timeout=20_000)
    assert "id=" in page.url
    page.close()
