"""The page of `chat --web`, served by the command in a process of its own, in a headless Chromium."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Locator, expect
from playwright.sync_api import Page as Tab

SECONDS = 120
expect.set_options(timeout=SECONDS * 1000)


class Server:
    """`inplace-ttt chat MODEL --web` in `folder`, until it answers."""

    def __init__(self, folder: Path, model: Path, *words: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"log-{self.port}"
        self.words = [
            *(sys.executable, "-m", "inplace_ttt.cli", "chat", str(model), "--web", "--port", str(self.port)),
            *map(str, words),
        ]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                self.words, stdout=out, stderr=out, cwd=folder, env=environment(), start_new_session=True
            )
        end = time.monotonic() + SECONDS
        while "Ctrl-C ends it" not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Ends it as Ctrl-C does, without a traceback."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(SECONDS) == 0
        assert "Traceback" not in self.log.read_text()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


@contextmanager
def serving(folder: Path, model: Path, *words: object) -> Iterator[Server]:
    server = Server(folder, model, *words)
    try:
        yield server
        if server.process.returncode is None:  # neither ended nor killed by the test
            server.end()
    finally:
        if server.process.poll() is None:
            server.kill()


class Page:
    """A tab with the page, as a person uses it."""

    def __init__(self, browser: Browser, address: str) -> None:
        self.tab: Tab = browser.new_context().new_page()
        self.hosts: set[str] = set()
        self.tab.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.tab.on("dialog", lambda dialog: dialog.accept())
        self.tab.goto(address)
        self.wait()

    def wait(self) -> None:
        """Waits until the present turn has ended."""
        expect(self.tab.locator(".transcript")).to_be_visible()
        expect(self.button("Ask")).to_be_enabled()

    def button(self, name: str) -> Locator:
        return self.tab.get_by_role("button", name=name, exact=True)

    def press(self, name: str) -> None:
        self.button(name).click()

    def drop(self, *files: Path) -> None:
        self.tab.set_input_files("#files input[type=file]", files)

    def ask(self, question: str) -> None:
        """Asks, and does not wait for the answer."""
        self.tab.fill("#question textarea", question)
        self.press("Ask")
        expect(self.tab.locator("#question textarea")).to_have_value("")

    def name(self, name: str, button: str) -> None:
        """Makes a new session or a copy of that name."""
        self.tab.fill("#other input, #other textarea", name)
        self.press(button)
        expect(self.tab.get_by_label(name, exact=True)).to_be_visible()

    def choose(self, name: str) -> None:
        self.tab.get_by_label(name, exact=True).click()
        expect(self.sizes).to_contain_text(f"/{name}.session")

    @property
    def chosen(self) -> str:
        return str(self.tab.locator("#names input:checked").input_value())

    @property
    def transcript(self) -> Locator:
        return self.tab.locator(".transcript")

    @property
    def sizes(self) -> Locator:
        return self.tab.locator(".sizes")

    @property
    def state(self) -> Locator:
        return self.tab.locator("#state")

    def answers(self, kind: str) -> list[str]:
        """The answers `with` or `without` the fast weights."""
        return self.tab.locator(f"article.{kind} .answer").all_inner_texts()
