"""A studio as its own process, a browser that was given its address, and requests without one."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WAIT = 240.0
"""Seconds after which a test gives up on something that should have happened: never part of what it says."""


class StudioProcess:
    """`qflux studio` on a folder."""

    def __init__(self, folder: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        self.log = folder.parent / f"{folder.name}.studio.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "qflux.cli", "studio", str(folder), "--port", "0", "--no-browser", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        wait_for(lambda: self._addresses() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        self.port = int(re.search(r":(\d+)/", self._addresses()[0])[1])

    def _addresses(self) -> list[str]:
        return re.findall(r"https?://\S+", self.log.read_text())

    @property
    def address(self) -> str:
        """The newest that was printed."""
        return self._addresses()[-1]

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cookie(self) -> str:
        """What a browser gets for the address."""
        answer = self.ask("GET", self.address.removeprefix(self.root))
        return answer.headers["set-cookie"].split(";")[0]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """A request, with nothing but these headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        try:
            data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
            if body is not None and not isinstance(body, bytes):
                headers.setdefault("content-type", "application/json")
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, named)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextmanager
def studio(folder: Path, *options: str) -> Iterator[StudioProcess]:
    found = StudioProcess(folder, *options)
    try:
        yield found
    finally:
        found.close()


def wait_for(happened: Callable[[], Any], what: str = "") -> Any:
    """What a function says as soon as it says anything; a failure if it never does."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        found = happened()
        if found:
            return found
        time.sleep(0.1)
    pytest.fail(f"never happened: {what or happened}")


@contextmanager
def browsing(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A real browser, which can reach nothing but this machine."""
    if not BROWSER or not DRIVER:
        pytest.skip("no Chromium here")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = BROWSER
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def requests_of(driver: Any) -> set[str]:
    """Every address that a page has asked for."""
    found = set()
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.add(message["params"]["request"]["url"])
    return found
