"""`chat --web` in a headless Chromium. `make test-web` makes the environment; elsewhere these tests are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from cli.chatting import save_speaking
from transformers import AutoTokenizer

from inplace_ttt import Session
from inplace_ttt.checkpoint.opened import load
from inplace_ttt.cli.chat.conversation import Conversation
from inplace_ttt.cli.chat.terminal import Stop
from inplace_ttt.cli.chat.turns import Turns

pytest.importorskip("gradio", reason="the page needs Gradio: make test-web")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="a browser is driven by playwright: make test-web"
)
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no chromium on the PATH: apt-get install chromium", allow_module_level=True)

from web.pages import Page, environment, expect, serving  # noqa: E402 - it needs playwright

SHORT = ("--max-new-tokens", 5)
LONG = ("--max-new-tokens", 100_000)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends its answers (`ttt`), one that does not (`endless`), and a text."""
    folder = tmp_path_factory.mktemp("web")
    base = tiny.save_base(folder / "base")
    end = tiny.tokenizer().convert_tokens_to_ids("</s>")
    save_speaking(base, folder / "ttt", "</s>", forced_eos_token_id=end)
    save_speaking(base, folder / "endless")
    (folder / "book.txt").write_text(tiny.text(900))
    (folder / "long.txt").write_text(tiny.text(200_000))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


def conversation(model: Path, most: int = 5) -> Conversation:
    turns = Turns(AutoTokenizer.from_pretrained(model), None, str(model))
    return Conversation(load(str(model), dtype=torch.float32).eval(), turns, str(model), most, 0.0)


def in_terminal(chat: Conversation, question: str) -> tuple[str, str]:
    """The answers with and without the fast weights, both from the session before the question."""
    chat.switch(False)
    without = chat.answer(question, Stop(), lambda _: None)
    chat.switch(True)
    return chat.answer(question, Stop(), lambda _: None), without


def tokens_of(file: Path, model: Path) -> torch.Tensor:
    tokens = Session.load(file, load(str(model), dtype=torch.float32)).tokens
    assert tokens is not None
    return tokens


def test_a_session_on_the_page_is_that_of_the_terminal_and_survives_a_kill(
    world: Path, tmp_path: Path, browser: playwright.Browser
) -> None:
    model, chat, folder = world / "ttt", conversation(world / "ttt"), tmp_path / "sessions"
    with serving(tmp_path, model, *SHORT) as server:
        page = Page(browser, server.address)
        assert page.chosen == "first"
        page.drop(world / "book.txt")
        expect(page.transcript).to_contain_text("tokens of book.txt")
        page.wait()
        page.ask("where is the <b>ship</b>?")
        page.wait()
        read = chat.read(tiny.text(900), "book.txt", Stop(), lambda *_: None)
        note = f"read {read:,} tokens of book.txt, wrote {chat.session.chunks_written} chunks"
        with_writes, without = in_terminal(chat, "where is the <b>ship</b>?")
        assert note in page.transcript.inner_text()
        assert page.answers("with") == [with_writes] and page.answers("without") == [without]
        assert with_writes != without
        assert page.tab.locator(".question").inner_text() == "where is the <b>ship</b>?"
        page.name("copy", "Fork")
        assert page.chosen == "first"
        page.tab.get_by_label("Answer without the fast weights too").uncheck()
        page.ask("and the whale?")
        page.wait()
        assert page.answers("with")[1:] == [chat.answer("and the whale?", Stop(), lambda _: None)]
        assert len(page.answers("without")) == 1
        page.name("other", "New")
        expect(page.sizes).to_contain_text("0 tokens, ")
        assert page.chosen == "other" and page.answers("with") == []
        page.choose("copy")
        assert page.answers("with") == [with_writes]
        page.tab.reload()
        page.wait()
        assert page.chosen == "copy" and page.answers("without") == [without]
        assert page.hosts == {f"127.0.0.1:{server.port}"}, "nothing is fetched from elsewhere"
        server.kill()
        with serving(tmp_path, model, *SHORT) as again:
            page = Page(browser, f"{again.address}/?session=first")
            assert page.chosen == "first" and len(page.answers("with")) == 2
            page.ask("and the captain?")
            page.wait()
            assert page.answers("with")[2:] == [chat.answer("and the captain?", Stop(), lambda _: None)]
        assert chat.session.tokens is not None
        assert tokens_of(folder / "first.session", model).equal(chat.session.tokens)
        assert tokens_of(folder / "copy.session", model).shape < chat.session.tokens.shape
        assert sorted(file.name for file in folder.iterdir()) == sorted(
            f"{name}.{ending}" for name in ("first", "copy", "other") for ending in ("session", "json")
        )


def test_drop_and_forget(world: Path, tmp_path: Path, browser: playwright.Browser) -> None:
    chat = conversation(world / "ttt")
    with serving(tmp_path, world / "ttt", *SHORT, "--sessions", tmp_path / "kept") as server:
        page = Page(browser, server.address)
        page.drop(world / "book.txt")
        expect(page.transcript).to_contain_text("tokens of book.txt")
        page.wait()
        page.press("Drop KV cache")
        expect(page.transcript).to_contain_text("the KV cache is empty")
        expect(page.sizes).to_contain_text("0 tokens, ")
        page.ask("the whale?")
        page.wait()
        chat.read(tiny.text(900), "book.txt", Stop(), lambda *_: None)
        chat.drop()
        with_writes, without = in_terminal(chat, "the whale?")
        assert (page.answers("with"), page.answers("without")) == ([with_writes], [without])
        chat.forget()
        assert without == in_terminal(chat, "the whale?")[1], "the base's answer"
        page.press("Forget")
        expect(page.transcript).not_to_contain_text("the KV cache is empty")
        expect(page.sizes).to_contain_text("0 chunks written")
    assert Session.load(tmp_path / "kept" / "first.session", chat.model).chunks_written == 0


def test_stop_in_two_tabs(world: Path, tmp_path: Path, browser: playwright.Browser) -> None:
    """A turn waits for the other session's. Every tab of a session shows its answer, and stops it."""
    with serving(tmp_path, world / "endless", *LONG) as server:
        page = Page(browser, server.address)
        page.drop(world / "long.txt")
        expect(page.state.locator("progress")).to_be_visible()
        page.press("Stop")
        expect(page.transcript).to_contain_text("stopped: read ")
        page.wait()
        page.press("Forget")
        expect(page.transcript).not_to_contain_text("stopped")
        page.ask("hello")
        expect(page.transcript).to_contain_text("whale")
        same = Page.__new__(Page)
        same.tab = browser.new_page()
        same.tab.goto(server.address)
        expect(same.transcript).to_contain_text("whale")
        other = Page.__new__(Page)
        other.tab = browser.new_page()
        other.tab.goto(server.address)
        expect(other.transcript).to_contain_text("whale")
        other.name("other", "New")
        expect(other.button("Ask")).to_be_enabled()
        other.ask("and the ship?")
        expect(other.state).to_contain_text("waiting for the turn of another session")
        same.press("Stop")
        page.wait()
        expect(other.transcript).to_contain_text("whale")
        other.press("Stop")
        other.wait()
        page.tab.reload()
        page.wait()
        (answer,) = page.answers("with")
        assert len(answer.split()) > 3 and page.answers("without") == []
    held = AutoTokenizer.from_pretrained(world / "endless").decode(
        tokens_of(tmp_path / "sessions" / "first.session", world / "endless")[0]
    )
    assert held.count("<s>user: hello</s>") == 1 and answer in held


def test_ctrl_c_saves_the_answer_so_far(world: Path, tmp_path: Path, browser: playwright.Browser) -> None:
    with serving(tmp_path, world / "endless", *LONG) as server:
        page = Page(browser, server.address)
        page.ask("hello")
        expect(page.transcript).to_contain_text("whale")
        server.end()
    assert tokens_of(tmp_path / "sessions" / "first.session", world / "endless").shape[1] > 10


def test_a_refusal_is_one_sentence_on_the_page(
    world: Path, tmp_path: Path, browser: playwright.Browser
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / "empty.txt").write_text(" \n")
    with serving(tmp_path, world / "ttt", *SHORT) as server:
        page = Page(browser, server.address)
        page.drop(tmp_path / "latin.txt")
        expect(page.tab.get_by_text("cannot read the file latin.txt")).to_be_visible()
        page.drop(tmp_path / "empty.txt")
        expect(page.tab.get_by_text("empty.txt holds no text; give something to read.")).to_be_visible()
        page.tab.fill("#other input, #other textarea", "../up")
        page.press("Fork")
        expect(page.tab.get_by_text("a memory's name is up to 64 letters")).to_be_visible()
        page.tab.fill("#other input, #other textarea", "first")
        page.press("New")
        expect(page.tab.get_by_text("there is a session first already")).to_be_visible()
        page.ask("hello")
        page.wait()
        assert len(page.answers("with")) == 1
        taken = subprocess.run(server.words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert taken.returncode == 2 and taken.stderr.count("\n") == 1
        assert f"port {server.port} of 127.0.0.1 cannot be used (Address already in use)" in taken.stderr
    assert not [file for file in tmp_path.iterdir() if "up" in file.name]


def test_an_answer_that_fails_halfway_leaves_the_session_of_the_turn_before(
    world: Path, tmp_path: Path, browser: playwright.Browser
) -> None:
    save_speaking(world / "base", tmp_path / "beams", num_beams=4)
    with serving(tmp_path, tmp_path / "beams") as server:
        page = Page(browser, server.address)
        page.drop(world / "book.txt")
        expect(page.transcript).to_contain_text("tokens of book.txt")
        page.wait()
        before = page.sizes.inner_text()
        page.ask("hello")
        expect(page.state).to_contain_text("num_beams")
        expect(page.state).to_contain_text("goes on as it was saved last")
        page.wait()
        assert page.answers("with") == [] and page.sizes.inner_text() == before
        assert "tokens of book.txt" in page.transcript.inner_text()
