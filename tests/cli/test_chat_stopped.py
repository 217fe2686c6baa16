"""A chat that is stopped, killed, piped or refused goes on, or leaves a whole session."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from forkserver import FORKSERVER
from transformers import AutoTokenizer

from inplace_ttt import Session, cli
from inplace_ttt.checkpoint.opened import load
from inplace_ttt.cli.chat.terminal import Stop
from inplace_ttt.cli.chat.turns import Place

from .chatting import SHORT, Chats, Typed, conversation, save_speaking, session_in


def test_a_stopped_answer_leaves_a_whole_session(world: Path) -> None:
    """The same as if the answer had ended there: a copy that reads the tokens anew answers the same."""
    chat, stop = conversation(world / "endless", most=40), Stop()
    chat.answer("hello", Stop(), lambda _: None)
    pieces: list[str] = []

    def press(piece: str) -> None:
        pieces.append(piece)
        stop.asked = len(pieces) > 2

    chat.answer("and the whale?", stop, press)
    assert len(pieces) < 10
    assert chat.session.cache.get_seq_length() == chat.tokens - 1
    tokens = chat.session.tokens
    then = chat.answer("and the ship?", Stop(), lambda _: None)
    again = conversation(world / "endless", most=40)
    again.session.read(tokens, up_to_last=True)
    assert again.answer("and the ship?", Stop(), lambda _: None) == then
    assert chat.session.tokens.equal(again.session.tokens)


def test_a_stopped_reading_leaves_a_whole_session(world: Path) -> None:
    chat, stop = conversation(world / "endless"), Stop()

    def press(read: int, total: int) -> None:
        assert 1024 == read < total
        stop.asked = True

    assert chat.read(tiny.text(3000), "book", stop, press) == 1024
    assert (chat.place, chat.tokens, chat.session.cache.get_seq_length()) == (Place.OPEN, 1024, 1024)
    assert chat.answer("the whale?", Stop(), lambda _: None)
    text = chat.turns.tokenizer.decode(chat.session.tokens[0])
    assert text.count("<s>user: ") == 1 and "\n\nthe whale?</s><s>assistant: " in text


@pytest.mark.full
def test_a_person_at_a_terminal(world: Path, tmp_path: Path) -> None:
    """Reads, answers, is stopped in the middle of an answer, answers again, saves, ends."""
    file = tmp_path / "s"
    chat = Typed(world / "endless", "--session", file, "--max-new-tokens", 100_000)
    chat.wait_for("> ")
    chat.type(f"/read {world / 'book.txt'}\n")
    chat.wait_for("tokens of ")
    chat.wait_for("> ")
    for question in ("hello\n", "and the whale?\n"):
        chat.type(question)
        chat.wait_for("?" if "?" in question else "hello")
        chat.wait_for("the")  # of an answer that would take an hour
        time.sleep(0.5)
        chat.type("\x03")
        chat.wait_for("\n> ")
    time.sleep(0.5)  # the prompt is printed before the line is read
    chat.type("\x03")
    chat.wait_for("/quit or Ctrl-D ends the chat")
    chat.type("/info\n")
    assert "15 chunks" not in chat.wait_for("saved to ")
    chat.type("\x04")
    assert chat.end() == 0
    session = session_in(file, world / "endless")
    text = AutoTokenizer.from_pretrained(world / "endless").decode(session.tokens[0])
    assert text.count("<s>user: ") == text.count("<s>assistant: ") == 2
    assert session.cache.get_seq_length() == session.tokens.shape[1] - 1


@pytest.mark.full
def test_a_chat_that_is_killed_while_it_saves_leaves_a_whole_session(
    world: Path, tmp_path: Path, chats: Chats
) -> None:
    file, model = tmp_path / "s", world / "endless"
    (tmp_path / "long.txt").write_text(tiny.text(20_000))  # so that a save takes a while
    chats.run(model, *SHORT, "--session", file, "--read", tmp_path / "long.txt", lines=("hello",))
    tokens, size = session_in(file, model).tokens, file.stat().st_size
    draw, lines = random.Random(0), tmp_path / "lines"
    lines.write_text("/save\n" * 100_000)
    loaded = load(str(model), dtype=torch.float32).eval()
    for _ in range(8):
        words = [str(model), "--session", str(file)]
        process = FORKSERVER.Process(target=_from_file, args=(lines, words))
        process.start()
        before = file.stat().st_mtime_ns
        while file.stat().st_mtime_ns == before:
            assert process.is_alive()
            time.sleep(0.01)
        until, sizes = time.monotonic() + draw.uniform(0.1, 0.4), set()
        while time.monotonic() < until:
            sizes.add(file.stat().st_size)
        assert process.is_alive(), "it must be killed while it saves"
        process.kill()
        process.join()
        assert sizes == {size}, "the file is whole at any moment"
        assert Session.load(file, loaded).tokens.equal(tokens)
    chats.run(model, *SHORT, "--session", file, lines=("and then?",))
    after = session_in(file, model).tokens
    assert after.shape[1] > tokens.shape[1] and after[:, : tokens.shape[1]].equal(tokens)
    assert not [left for left in tmp_path.iterdir() if left.name.endswith(".partial")]


def _from_file(lines: Path, words: list[str]) -> None:
    sys.stdin = lines.open()
    sys.argv[1:] = ["chat", *words]
    sys.exit(cli.main())


@pytest.mark.full
def test_a_pipe_gets_the_answers_alone(world: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "inplace_ttt.cli", "chat", "plain", "--max-new-tokens", "4"]
    lines = b"hello\n\n/read none.txt\n/sing\nand the whale?\n/help\n\xff\xfe\n"
    done = subprocess.run(command, cwd=world, env=environment, input=lines, capture_output=True)
    assert done.returncode == 0
    answers = done.stdout.decode().splitlines()
    assert len(answers) == 2 and all(answers)
    said = done.stderr.decode()
    assert said.count("lacks a chat template") == 1
    for sentence in ("cannot read the file none.txt", "'/sing' is not a command", "/fork FILE", "not UTF-8"):
        assert said.count(sentence) == 1, said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/sing", "'/sing' is not a command; see /help, or begin a question with a space."),
        ("/read", "/read needs a file; give /read FILE."),
        ("/read none.txt", "cannot read the file none.txt: "),
        ("/read .", "cannot read the file .: "),
        ("/read -", "- is standard input, from which the chat reads its turns; give a file."),
        ("/read empty.txt", "empty.txt holds no text; give something to read."),
        ("/read latin.txt", "cannot read the file latin.txt: "),
        ("/save", "this session does not have a file yet; give one: /save FILE."),
        ("/save empty.txt/x", "cannot write next to empty.txt/x: "),
        ("/save latin.txt", "latin.txt"),
        ("/fork", "/fork needs a file; give /fork FILE."),
        ("/fork latin.txt", "latin.txt"),
        ("/quit now", "/quit does not take an argument; give /quit alone."),
        ("/off all", "/off does not take an argument; give /off alone."),
    ],
)
def test_a_refused_command_is_one_sentence_and_the_chat_goes_on(
    line: str, sentence: str, world: Path, tmp_path: Path, chats: Chats, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text(" \n")
    Path("latin.txt").write_bytes(b"\xe9t\xe9")
    out, err = chats.run(world / "ttt", *SHORT, lines=("/info", line, "hello"))
    assert len(out.splitlines()) == 1
    before, (said,) = err.splitlines()[:-1], err.splitlines()[-1:]
    assert sentence in said and said.endswith("."), err
    assert all("tokens, " in note for note in before[-2:])
    assert Path("latin.txt").read_bytes() == b"\xe9t\xe9"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("ttt", "--read", "none.txt"), "cannot read the file none.txt"),
        (("ttt", "--read", "-"), "- is standard input"),
        (("ttt", "--session", "book.txt"), "book.txt"),
        (("ttt", "--session", "none/s"), "cannot write next to none/s"),
        (("ttt", "--system", " "), "--system is empty"),
        (("ttt", "--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
        (("base",), "not a converted checkpoint"),
        (("ttt", "--port", "7860"), "--port is for the page; give --web too"),
        (("ttt", "--sessions", "kept"), "--sessions is for the page; give --web too"),
        (("ttt", "--web", "--session", "s"), "--session is for the terminal"),
        (("ttt", "--web", "--read", "book.txt"), "--read is for the terminal"),
        (("http://127.0.0.1:1", "--web"), "--web needs a model on this machine, not a server"),
        (("ttt", "--web", "--ttt", "off"), "--ttt off is for the terminal"),
        (("ttt", "--web"), "needs Gradio, which is not installed; in a checkout of inplace-ttt, pip install"),
    ],
)
def test_what_is_refused_before_the_chat(
    words: tuple[str, ...], sentence: str, world: Path, chats: Chats, monkeypatch: Any
) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setitem(sys.modules, "gradio", None)  # as if it was not installed
    out, err = chats.run(*words, lines=("hello",), code=2)
    assert out == "" and err.startswith("inplace-ttt chat: ") and err.count("\n") == 1 and sentence in err


def test_positions_beyond_the_config_are_named_once(world: Path, tmp_path: Path, chats: Chats) -> None:
    tiny.save_converted(tiny.save_base(tmp_path / "base", positions=256), tmp_path / "ttt")
    out, err = chats.run(tmp_path / "ttt", *SHORT, "--read", world / "book.txt", lines=("hello", "hello"))
    assert err.count("positions that the model's config names") == 1 and out.count("\n") >= 2


def test_system_instructions_for_a_session_that_has_begun(world: Path, tmp_path: Path, chats: Chats) -> None:
    words = (world / "ttt", *SHORT, "--session", tmp_path / "s", "--system", "be brief")
    assert "--system takes effect after" not in chats.run(*words, lines=("hello",))[1]
    assert "--system takes effect after" in chats.run(*words, lines=("hello",))[1]


def test_a_full_stdout_ends_the_chat_and_the_session_stays(
    world: Path, tmp_path: Path, chats: Chats, monkeypatch: Any
) -> None:
    file = tmp_path / "s"
    chats.run(world / "ttt", *SHORT, "--session", file, lines=("hello",))
    before = file.read_bytes()
    with monkeypatch.context() as patch, open("/dev/full", "w") as full:
        patch.setattr("sys.stdout", full)
        _, err = chats.run(world / "ttt", *SHORT, "--session", file, lines=("hello", "hello"), code=2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # the rest of the buffer
    assert err.endswith("cannot write the answer to standard output: No space left on device.\n")
    assert file.read_bytes() == before


def test_a_setting_that_fails_halfway_ends_the_chat(world: Path, tmp_path: Path, chats: Chats) -> None:
    save_speaking(world / "base", tmp_path / "ttt", num_beams=4)
    _, err = chats.run(tmp_path / "ttt", lines=("hello", "hello"), code=2)
    assert "num_beams" in err.splitlines()[-1]
