"""Draws the pictures of these pages from a demo run: `make pictures`. Needs Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "gradvitals"]
VIEWS = (("page", "light", 1280), ("page_dark", "dark", 1280), ("phone", "light", 390))
READY = "document.querySelectorAll('canvas').length"


def main() -> None:
    """Train, serve, and keep what the browser shows."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium was found on the path; install it, e.g. with: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        for name, options in (("without_fault", ["--no-fault"]), ("demo", [])):  # the page opens the newest
            demo = [*COMMAND, "demo", "--steps", "300", "--out", str(runs / name), *options]
            subprocess.run(demo, check=True, stdout=subprocess.DEVNULL)
        report = Path(folder) / "report.html"
        subprocess.run([*COMMAND, "report", str(runs / "demo"), "--html", str(report)], check=True)
        server = subprocess.Popen([*COMMAND, "serve", str(runs), "--port", "0"], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                for name, scheme, width in (
                    ("page", "light", 1280),
                    ("page_dark", "dark", 1280),
                    ("phone", "light", 390),
                ):
                    page = browser.new_page(viewport={"width": width, "height": 980}, color_scheme=scheme)
                    page.goto(found.group())
                    while page.evaluate(READY) < 4:  # the page's policy forbids Playwright's own way to wait
                        page.wait_for_timeout(100)
                    page.wait_for_timeout(1500)
                    keep(page, name)
                page = browser.new_page(viewport={"width": 1280, "height": 980})
                page.goto(report.as_uri())
                keep(page, "report")
                browser.close()
        finally:
            server.terminate()
            server.wait()


def keep(page: Page, name: str) -> None:
    """What is on the screen, as a file beside this one."""
    page.screenshot(path=HERE / f"{name}.png")
    print(HERE / f"{name}.png")


if __name__ == "__main__":
    main()
