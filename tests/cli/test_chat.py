"""The chat: its turns are the chat template's text, its session survives Ctrl-C, SIGKILL and a new process."""

import itertools
import json
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import InPlaceTTTError, Session, cli
from inplace_ttt.checkpoint.opened import load
from inplace_ttt.cli.chat.conversation import Conversation
from inplace_ttt.cli.chat.terminal import Stop
from inplace_ttt.cli.chat.turns import PLAIN, Place, Turns

from .chatting import Chats, Typed, save_speaking, without_template

SHORT = ("--max-new-tokens", 5)


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


def session_in(file: Path, model: Path) -> Session:
    return Session.load(file, load(str(model), dtype=torch.float32).eval())


def conversation(model: Path, most: int = 5) -> Conversation:
    """A conversation in memory."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = Turns(tokenizer, None, str(model))
    return Conversation(load(str(model), dtype=torch.float32).eval(), turns, str(model), most, 0.0)


QUESTIONS = ("hello", "/read book.txt", "where is the ship?", " /and the whale?")


@pytest.mark.parametrize("system", [(), ("--system", " be brief ")], ids=["", "system"])
@pytest.mark.parametrize("model", ["ttt", "endless", "plain"])
def test_the_sessions_tokens_are_those_of_the_rendered_conversation(
    model: str, system: tuple[str, ...], world: Path, tmp_path: Path, chats: Chats, monkeypatch: Any
) -> None:
    monkeypatch.chdir(world)
    torch.manual_seed(0)  # `plain` ends a line when it draws a newline
    how = ("--temperature", 100, "--max-new-tokens", 60) if model == "plain" else SHORT
    file = tmp_path / "s"
    answers = chats.answers(model, *how, *system, "--session", file, lines=QUESTIONS)
    assert len(answers) == 3 and all(answers)
    texts = ["hello", f"{tiny.text(900)}\n\nwhere is the ship?", "/and the whale?"]
    messages = [{"role": "system", "content": "be brief"}] if system else []
    for text, answer in zip(texts, answers, strict=True):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": f" {answer}"}]
    tokenizer = AutoTokenizer.from_pretrained(world / model)
    template = {"chat_template": PLAIN} if model == "plain" else {}
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, **template)
    expected = tokenizer(rendered, add_special_tokens=False).input_ids
    if model == "endless":  # stopped by --max-new-tokens: the next turn would end it
        expected = expected[:-1]
    assert session_in(file, world / model).tokens.tolist() == [expected]


TEMPLATES = {
    "ChatML": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "Llama 3": "{{ '<begin>' }}{% for m in messages %}<|{{ m.role }}|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}",
    "Mistral": "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} {% endif %}",
    # as Qwen 3: the thoughts of earlier answers are dropped, and the last of no answers has empty ones
    "thinking": "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% if loop.last %}<think></think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<e>{% else %}<u>{{ m.content }}<e>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}",
    "none": None,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_all_turns_together_are_the_whole_template(name: str) -> None:
    tokenizer = tiny.byte_level()
    tokenizer.chat_template = TEMPLATES[name]
    turns = Turns(tokenizer, None, "here")
    asked, answers = ["one", "a file\n\nand\n\ntwo", "three"], ["first", "second", "third"]
    pieces = [
        turns.ids(Place.START, "one", "x", asks=True),
        turns.ids(Place.ANSWERED, "a file", "x", asks=False),
        turns.ids(Place.OPEN, "and", "x", asks=False),
        turns.ids(Place.OPEN, "two", "x", asks=True),
        turns.ids(Place.ANSWERED, "three", "x", asks=True),
    ]
    read = [tokenizer.decode(ids) for ids in pieces]
    text = read[0] + answers[0] + "".join(read[1:4]) + answers[1] + read[4]
    messages: list[dict[str, str]] = []
    for question, answer in itertools.zip_longest(asked, answers[:2]):
        messages.append({"role": "user", "content": question})
        messages += [{"role": "assistant", "content": answer}] if answer else []
    whole = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATES[name] or PLAIN, tokenize=False, add_generation_prompt=True
    )
    assert text == whole
    assert turns.in_a_turn(text) and not turns.in_a_turn(tiny.text(50))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.revindex }} {{ m.content }}</s>{% endfor %}",
        "{{ messages | length }}{% for m in messages %} {{ m.content }}</s>{% endfor %}",
        "{% for m in messages %}{{ m.content[:0] }}</s>{% endfor %}",
        "{% for m in messages %}{% if loop.index0 > 2 %}again {% endif %}{{ m.content }}</s>{% endfor %}",
    ],
)
def test_a_template_that_changes_earlier_turns_is_refused(template: str) -> None:
    tokenizer = tiny.byte_level()
    tokenizer.chat_template = template
    with pytest.raises(InPlaceTTTError, match="chat template of here changes an earlier turn"):
        Turns(tokenizer, None, "here")


def test_system_instructions_that_move_are_refused() -> None:
    """As Mistral's template puts them before the last turn."""
    tokenizer = tiny.byte_level()
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}{% if loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }} {% endif %}{{ m.content }}</s>{% endfor %}"
    )
    Turns(tokenizer, None, "here")
    with pytest.raises(InPlaceTTTError, match="leave out --system, or correct"):
        Turns(tokenizer, "be brief", "here")


def test_a_session_continues_in_another_process_as_in_one(world: Path, tmp_path: Path, chats: Chats) -> None:
    questions = ("hello", f"/read {world / 'book.txt'}", "and the ship?", "the whale?")
    for model in ("ttt", "plain"):
        at_once, in_parts = tmp_path / f"{model}-once", tmp_path / f"{model}-parts"
        answers = chats.answers(world / model, *SHORT, "--session", at_once, lines=questions)
        again = [
            answer
            for question in questions
            for answer in chats.answers(world / model, *SHORT, "--session", in_parts, lines=(question,))
        ]
        assert answers == again and len(answers) == 3
        once, parts = (session_in(file, world / model) for file in (at_once, in_parts))
        assert once.tokens.equal(parts.tokens) and once.chunks_written == parts.chunks_written > 10


def test_a_session_of_generate_continues(world: Path, tmp_path: Path, chats: Chats) -> None:
    """Its text stands outside of turns, so that the first question begins a turn."""
    for model, header in (("ttt", "<s>user: "), ("plain", "User: ")):
        file = tmp_path / model
        read = ["--prompt-file", str(world / "book.txt"), "--max-new-tokens", "0", "--save-state", str(file)]
        assert cli.main(["generate", str(world / model), *read]) == 0
        before = session_in(file, world / model).tokens
        chats.answers(world / model, *SHORT, "--session", file, lines=("and the ship?",))
        after = session_in(file, world / model).tokens
        assert after[:, : before.shape[1]].equal(before)
        new = AutoTokenizer.from_pretrained(world / model).decode(after[0, before.shape[1] :])
        assert new.startswith(f"\n\n{header}and the ship?")


def test_off_answers_as_the_base_and_on_does_not(world: Path, chats: Chats) -> None:
    question = tiny.text(300)
    on, off = (
        chats.answers(world / "endless", "--max-new-tokens", 12, "--ttt", ttt, lines=(question,))[0]
        for ttt in ("on", "off")
    )
    switched = chats.answers(
        world / "endless", "--max-new-tokens", 12, lines=("/off", question, "/forget", "/on", question)
    )
    base = AutoModelForCausalLM.from_pretrained(world / "base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(world / "endless")
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids
    config = json.loads((world / "endless" / "generation_config.json").read_text())
    new = base.generate(ids, max_new_tokens=12, do_sample=False, suppress_tokens=config["suppress_tokens"])
    assert off == tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True).strip() != on
    assert switched == [off, on]


@pytest.mark.parametrize("preset", ["gradient", "ttt_ntp"])
def test_turns_without_the_fast_weights_leave_the_session_as_it_was(
    preset: str, world: Path, tmp_path: Path, chats: Chats
) -> None:
    """A gradient over a chunk with a gap could not be computed."""
    model = tmp_path / "model"
    convert = ["convert", str(world / "base"), str(model), "--preset", preset, "--chunk-size", "64"]
    if preset == "gradient":
        (tmp_path / "long.txt").write_text(tiny.text(4000))
        convert += ["--calibrate", str(tmp_path / "long.txt"), "--layers", "0", "--eta", "1"]
    assert cli.main(convert) == 0
    book, without, beside = f"/read {world / 'book.txt'}", tmp_path / "without", tmp_path / "beside"
    then = tiny.text(80)
    expected = chats.answers(model, *SHORT, "--session", without, lines=(book, "hello", then))
    lines = (book, "hello", "/off", then, book, "/on", then)
    answers = chats.answers(model, *SHORT, "--session", beside, lines=lines)
    assert [answers[0], answers[2]] == expected
    assert without.read_bytes() == beside.read_bytes()
    lines = ("/off", "hello", f"/read {world / 'book.txt'}", "/drop", "hello")
    chats.answers(model, *SHORT, "--session", beside, lines=lines)
    assert session_in(beside, model).tokens is None


def test_forget_and_drop(world: Path, tmp_path: Path, chats: Chats) -> None:
    book, model, file = world / "book.txt", world / "ttt", tmp_path / "s"
    fresh = chats.answers(model, *SHORT, lines=("the whale?",))
    assert chats.answers(model, *SHORT, "--read", book, lines=("/forget", "the whale?")) == fresh
    chats.answers(model, *SHORT, "--session", file, lines=(f"/read {book}", "hello", "/drop"))
    dropped = session_in(file, model)
    assert dropped.tokens is None and dropped.cache.get_seq_length() == 0 and dropped.chunks_written > 10
    chats.answers(model, *SHORT, "--session", file, lines=("the whale?",))
    begun = session_in(file, model)
    assert begun.chunks_written >= dropped.chunks_written
    assert begun.tokens.shape[1] < 40  # a new conversation
    chats.answers(model, *SHORT, "--session", file, lines=("/forget",))
    assert session_in(file, model).chunks_written == 0


def test_save_renames_and_fork_does_not(world: Path, tmp_path: Path, chats: Chats) -> None:
    old, copy, new = (tmp_path / name for name in ("old", "copy", "new"))
    model = world / "ttt"
    lines = ("one", f"/fork {copy}", "two", f"/save {new}", "three")
    out, _ = chats.run(model, *SHORT, "--session", old, "--json", lines=lines)
    assert json.loads(out)["session"] == str(new)
    sizes = [session_in(file, model).tokens.shape[1] for file in (copy, old, new)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3


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
