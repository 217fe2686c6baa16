"""The chat: its turns are the chat template's text, its session survives Ctrl-C, SIGKILL and a new process."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import InPlaceTTTError, cli
from inplace_ttt.cli.chat.turns import PLAIN, Place, Turns

from .chatting import SHORT, Chats, session_in

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
