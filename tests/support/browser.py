"""A headless browser: Debian's chromium with its own driver."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

T = TypeVar("T")


def programs() -> tuple[str, str] | None:
    """Where the browser and its driver are; None where either is missing."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return None if program is None or driver is None else (program, driver)


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    """Skips where there is none."""
    there = programs()
    if there is None:
        pytest.skip("there is no browser here: apt-get install chromium chromium-driver")
    program, driver = there
    options = ChromeOptions()
    options.binary_location = program
    # As root, as CI is, chromium has no sandbox; nothing but the tests' own pages is opened.
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = Chrome(options=options, service=Service(driver))
    try:
        yield found
    finally:
        found.quit()


def log_in(chrome: Chrome, url: str, token: str) -> None:
    """Gives the browser the cookie that Airflow's login page gives."""
    chrome.get(f"{url}/cairn/checkpoints/static/cairn.css")
    chrome.add_cookie({"name": "_token", "value": token, "path": "/"})


def save_picture(chrome: Chrome, file: Path, colours: int = 64) -> None:
    """The window as a picture of few colours: a third of the bytes."""
    from PIL import Image

    chrome.save_screenshot(str(file))
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(colours, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def wait_for(condition: Callable[[], T], timeout_s: float = 20) -> T:
    """What the condition gives once that is true. Elements that are not there yet are waited for."""
    until_s = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < until_s:
        try:
            if found := condition():
                return found
        except WebDriverException as error:
            last = error.msg
        time.sleep(0.1)
    raise AssertionError(f"not within {timeout_s} s ({last})")
