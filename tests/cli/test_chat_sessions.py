"""Sessions by name, as the page of `chat --web` uses them: turns one after the other, files and transcripts."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTError
from inplace_ttt.checkpoint.opened import load
from inplace_ttt.cli.chat.conversation import Conversation
from inplace_ttt.cli.chat.named import Sessions
from inplace_ttt.cli.chat.transcript import html
from inplace_ttt.cli.chat.turns import Turns

from .chatting import save_speaking


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sessions")
    return save_speaking(tiny.save_base(folder / "base"), folder / "ttt")


def sessions(model: Path, folder: Path, most: int = 4) -> Sessions:
    loaded = load(str(model), dtype=torch.float32).eval()
    turns = Turns(AutoTokenizer.from_pretrained(model), None, str(model))

    def opened(file: str) -> Conversation:
        given = (loaded, turns, str(model), most, 0.0)
        if Path(file).exists():
            return Conversation.loaded(file, *given)
        conversation = Conversation(*given)
        conversation.file = file
        return conversation

    folder.mkdir(exist_ok=True)
    return Sessions(folder, opened)


def wait(all_of_them: Sessions, name: str) -> str:
    """The problem of the present turn, at its end."""
    named = all_of_them.get(name)
    assert named.turn is not None and named.turn.ended.wait(120)
    return named.problem


def test_both_answers_begin_with_the_same_tokens_and_one_becomes_part_of_the_session(
    model: Path, tmp_path: Path
) -> None:
    both, one = sessions(model, tmp_path / "both"), sessions(model, tmp_path / "one")
    for kept, beside in ((both, True), (one, False)):
        name = kept.first()
        kept.read(name, [("book", tiny.text(300))])
        assert wait(kept, name) == ""
        for question in ("hello", "the whale?"):
            kept.ask(name, question, beside)
            assert wait(kept, name) == ""
    with_copies, without = both.get("first"), one.get("first")
    assert [e.answer for e in with_copies.entries] == [e.answer for e in without.entries]
    assert all(e.without != e.answer for e in with_copies.entries[1:])
    assert all(e.without is None for e in without.entries)
    files = [tmp_path / name / "first.session" for name in ("both", "one")]
    assert files[0].read_bytes() == files[1].read_bytes()
    again = sessions(model, tmp_path / "both").get("first")
    assert (
        again.entries == with_copies.entries and again.conversation.tokens == with_copies.conversation.tokens
    )


def test_a_session_without_a_turn_is_let_go_and_read_again(model: Path, tmp_path: Path) -> None:
    kept = sessions(model, tmp_path / "kept")
    kept.new("a")
    kept.ask("a", "hello", False)
    wait(kept, "a")
    before = kept.get("a")
    for name in "bcdef":
        kept.new(name)
    assert kept.names() == [*"abcdef"]
    after = kept.get("a")
    assert after is not before and after.entries == before.entries and after.tokens == before.tokens > 4


def test_a_fork_keeps_its_transcript_and_its_name(model: Path, tmp_path: Path) -> None:
    kept = sessions(model, tmp_path / "kept")
    name = kept.first()
    kept.ask(name, "hello", True)
    wait(kept, name)
    kept.fork(name, "copy")
    kept.forget(name)
    assert kept.get(name).entries == [] and kept.get("copy").entries[0].text == "hello"
    for taken in ("copy", "first", "../up", "", ".hidden"):
        with pytest.raises(InPlaceTTTError, match=r"already|a memory's name"):
            kept.fork(name, taken)
    assert kept.names() == ["copy", "first"]


def test_a_busy_session_refuses_a_second_turn_and_a_stopped_one_is_whole(model: Path, tmp_path: Path) -> None:
    kept = sessions(model, tmp_path / "kept", most=4000)
    kept.new("a")
    kept.new("b")
    kept.ask("a", "hello", True)
    with pytest.raises(InPlaceTTTError, match="a is still busy; wait, or press Stop"):
        kept.ask("a", "hello", True)
    kept.ask("b", "hello", True)
    kept.stop("b")
    kept.stop("a")
    assert wait(kept, "a") in ("", "stopped before it began.")
    assert wait(kept, "b") == "stopped before it began."
    assert kept.get("b").entries == []
    kept.ask("b", "hello", True)
    kept.close()
    assert not kept.get("b").is_busy


def test_a_damaged_transcript_is_named_and_the_session_stays(model: Path, tmp_path: Path) -> None:
    kept = sessions(model, tmp_path / "kept")
    kept.ask(kept.first(), "hello", False)
    wait(kept, "first")
    file = tmp_path / "kept" / "first.json"
    for damaged in ("{", json.dumps({"format": "x"}), json.dumps({"format": "x", "entries": [{"text": 3}]})):
        file.write_text(damaged)
        named = sessions(model, tmp_path / "kept").get("first")
        assert named.tokens > 4 and named.entries == [] and "first.json" in named.problem
    with pytest.raises(InPlaceTTTError, match="there is no session 'none' in"):
        kept.get("none")


def test_texts_stay_texts_in_html(model: Path, tmp_path: Path) -> None:
    kept = sessions(model, tmp_path / "kept")
    name = kept.first()
    assert "drop a text file" in html([])
    assert "1,234 tokens that were read outside of this page" in html([], unseen_tokens=1234)
    kept.ask(name, "<img src=x>", True)
    wait(kept, name)
    (entry,) = kept.get(name).entries
    entry.answer = "<script>1</script> ![x](http://far/x.png) **bold** [y](javascript:1)"
    shown = html([entry])
    assert "&lt;img src=x&gt;" in shown and "<strong>bold</strong>" in shown
    for unsafe in ("<img", "<script", 'href="javascript'):
        assert unsafe not in shown
