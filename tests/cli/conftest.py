"""The models that the tests of the chat talk to, and the calls of the command."""

from pathlib import Path

import pytest
import tiny

from .chatting import Chats, save_speaking, without_template


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a template, which ends its answers (`ttt`), one that does not (`endless`), one without a
    template (`plain`), and a text."""
    folder = tmp_path_factory.mktemp("chat")
    base = tiny.save_base(folder / "base")
    end, newline = tiny.tokenizer().convert_tokens_to_ids(["</s>", "Ċ"])
    save_speaking(base, folder / "ttt", "</s>", forced_eos_token_id=end)
    save_speaking(base, folder / "endless")
    without_template(save_speaking(base, folder / "plain", "Ċ", begin_suppress_tokens=[newline]))
    (folder / "book.txt").write_text(f"\n{tiny.text(900)}\n\n")
    return folder


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chats:
    return Chats(monkeypatch, capsys)
