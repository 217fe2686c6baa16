"""A session as a weight: the plain model and the LoRA answer as the session does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from families import build
from models import RIDGE, converted, distance, logits, random_ids
from torch import Tensor

from inplace_ttt import InPlaceTTTError, KeyWhitening, PromptWrite, Session, cli, load
from inplace_ttt.families import CACHE
from inplace_ttt.session.weight_change import low_rank
from inplace_ttt.surgery import fast_weights

CHUNK, NEW = 128, 100
RULES: dict[str, dict[str, Any]] = {
    "sum": {},
    "gradient": {"target": "gradient", "eta": 0.3},
    "ridge on plain keys": {"update_rule": "ridge", "ridge": 0.5, "eta": 10.0},
    "linear whitened keys": {"whitening": KeyWhitening(0.75, centered=False), "eta": 3.0},
    "ridge": {**RIDGE, "whitening": KeyWhitening(0.75, centered=False)},
    "row norms": {"preserve_row_norms": True},
    "one write per prompt": {"conv": "next", "prompt_write": PromptWrite(eta=0.3, cap=0.5)},
}


def read_once(name: str, rule: str) -> Session:
    """A session in float64 that has written two chunks (or one prompt) and holds no unfinished one."""
    model = converted(name, torch.float64, chunk_size=CHUNK, **RULES[rule]).eval()
    session = Session(model)
    ids = random_ids(1, 2 * CHUNK)
    session.write_prompt(ids) if rule == "one write per prompt" else session.read(ids)
    return session


@torch.no_grad()
def after(session: Session, ids: Tensor) -> Tensor:
    """Logits of a text that the session reads without its KV cache."""
    cache = session.drop_kv_cache().cache
    return session.model(ids, **{CACHE: cache}, use_cache=True).logits


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_neox", "qwen3"])
def test_plain_model_and_lora_answer_as_the_session(name: str, rule: str, tmp_path: Path) -> None:
    from peft import PeftModel

    session = read_once(name, rule)
    text = random_ids(1, 20, seed=3)
    expected = after(session, text)
    plain = session.bake()
    assert type(plain) is type(build(name)) and not any(".ttt." in key for key in plain.state_dict())
    assert distance(logits(plain, text), expected) < 1e-9
    assert distance(logits(plain, text), logits(build(name, dtype=torch.float64).eval(), text)) > 1e-3

    base = build(name, dtype=torch.float64).eval()
    base.save_pretrained(tmp_path / "base")
    lost = session.to_lora(tmp_path / "lora", rank=32, base=str(tmp_path / "base"))
    assert max(lost.values()) < 1e-7  # of width 32
    adapted = PeftModel.from_pretrained(base, tmp_path / "lora").eval()
    assert distance(logits(adapted, text), expected) < 1e-5  # the adapter is float32


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_generates_the_same_tokens(name: str) -> None:
    session = read_once(name, "sum")
    prompt = random_ids(1, 8, seed=4)
    how: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    plain = session.bake()
    expected = session.drop_kv_cache().generate(prompt, **how)
    assert plain.generate(prompt, **how)[:, 8:].equal(expected)


def test_a_row_of_a_batch() -> None:
    model = converted("llama", torch.float64, chunk_size=16)
    session = Session(model)
    ids = random_ids(2, 32)
    session.read(ids)
    alone = Session(model)
    alone.read(ids[1:])
    for index, change in session.weight_changes(1).items():
        assert distance(change.matrix(), alone.weight_changes()[index].matrix()) < 1e-12
    with pytest.raises(InPlaceTTTError, match="rows 0 to 1, not row 2"):
        session.bake(2)


def test_tensors_are_shared_and_the_model_is_left_alone() -> None:
    session = read_once("llama", "sum")
    before = {key: value.clone() for key, value in session.model.state_dict().items()}
    plain = session.bake()
    ours, theirs = dict(session.model.named_parameters()), dict(plain.named_parameters())
    changed = {key for key in theirs if theirs[key].data_ptr() != ours[key].data_ptr()}
    assert changed == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 2)}
    assert all(value.equal(before[key]) for key, value in session.model.state_dict().items())
    assert fast_weights(session.model)


def test_the_best_matrix_of_its_rank() -> None:
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    for rank in (1, 5, 12, 99):
        found = low_rank(matrix, rank)
        lost = torch.linalg.vector_norm(matrix - found.b @ found.a) / torch.linalg.vector_norm(matrix)
        best = torch.linalg.vector_norm(values[rank:]) / torch.linalg.vector_norm(values)
        assert found.a.shape == (min(rank, 12), 30)
        assert abs(float(lost) - found.lost) < 1e-7 and abs(float(lost - best)) < 1e-7


def test_refuses_what_is_no_weight(tmp_path: Path) -> None:
    unread = Session(converted("llama"))
    with pytest.raises(InPlaceTTTError, match="written nothing"):
        unread.bake()
    session = Session(converted("llama", **RIDGE))
    session.read(random_ids(1, 40))
    with pytest.raises(InPlaceTTTError, match="not linear"):
        session.bake()
    build("llama").save_pretrained(tmp_path / "base")
    with pytest.raises(InPlaceTTTError, match="not linear"):
        session.to_lora(tmp_path / "lora", base=str(tmp_path / "base"))
    assert not (tmp_path / "lora").exists()


def test_refuses_a_lora_of_another_base(tmp_path: Path) -> None:
    session = read_once("llama", "sum")
    base = build("llama", dtype=torch.float64)
    with torch.no_grad():
        base.model.layers[1].self_attn.q_proj.weight += 1
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(InPlaceTTTError, match=r"another .*q_proj"):
        session.to_lora(tmp_path / "lora", base=str(tmp_path / "base"))
    assert not (tmp_path / "lora").exists()


WITHOUT_PACKAGE = """
import sys
sys.modules["inplace_ttt"] = None
import torch
from {library} import {auto}
model = {auto}.from_pretrained({folder!r}, dtype=torch.float32).eval()
with torch.no_grad():
    torch.save(model(torch.tensor({ids})).logits, {out!r})
"""


def answers_alone(folder: Path, library: str, auto: str, ids: Tensor) -> Tensor:
    """Logits of a folder, loaded in a process that cannot import this package."""
    out = folder.with_suffix(".pt")
    code = WITHOUT_PACKAGE.format(
        library=library, auto=auto, folder=str(folder), ids=ids.tolist(), out=str(out)
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return torch.load(out)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny.save_base(tmp_path / "base")
    full, text, state = tmp_path / "full", tmp_path / "text.txt", tmp_path / "text.state"
    text.write_text(tiny.text(400))
    how = ["--preset", "gradient", "--layers", "0,1", "--eta", "0.05", "--chunk-size", "16"]
    assert cli.main(["convert", str(base), str(full), *how, "--calibrate", str(text)]) == 0
    read = ["generate", str(full), "--prompt-file", str(text), "--max-new-tokens", "0"]
    assert cli.main([*read, "--save-state", str(state)]) == 0
    session = Session.load(state, load(full))
    ids = random_ids(1, 12)
    expected = after(session, ids)
    capsys.readouterr()

    def export(out: Path, *how: str) -> dict[str, Any]:
        assert cli.main(["export", str(full), str(out), "--session", str(state), *how, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["session"]

    plain, lora = tmp_path / "plain", tmp_path / "lora"
    kept = export(plain, "--format", "plain")["kept"]
    assert kept["without"] != kept["session"] == pytest.approx(kept["exported"], abs=1e-5)
    assert distance(answers_alone(plain, "transformers", "AutoModelForCausalLM", ids), expected) < 1e-4
    assert export(lora, "--format", "lora", "--rank", "32")["rank"] == 32
    names = [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(file.name for file in lora.glob("[!.]*")) == names
    assert distance(answers_alone(lora, "peft", "AutoPeftModelForCausalLM", ids), expected) < 1e-4
    for card in (plain / "README.md", lora / "README.md"):
        assert "[In-Place Test-Time" in card.read_text()
    twice = export(tmp_path / "twice", "--format", "lora", "--session", str(state), str(state))
    assert twice["chunks"] == 2 * session.chunks_written


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--format plain", "name it with --session"),
        ("--format adapter --session STATE", "--session does nothing with --format adapter"),
        ("--format plain --session STATE --rank 4", "--rank does nothing with --format plain"),
        ("--format lora --session NOTHING", "NOTHING"),
        ("--format plain --session UNREAD", "written nothing"),
    ],
)
def test_refuses_by_one_sentence(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tiny.save_converted(tiny.save_base(tmp_path / "base"), tmp_path / "full")
    model = load(full)
    for name, tokens in (("STATE", 40), ("UNREAD", 3)):
        session = Session(model)
        session.read(random_ids(1, tokens))
        session.save(tmp_path / name)
    given = [str(tmp_path / word) if word.isupper() else word for word in words.split()]
    capsys.readouterr()
    assert cli.main(["export", str(full), str(tmp_path / "out"), *given]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert message in said and said.endswith(".")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rule", ["sum", "ridge on plain keys", "gate"])
def test_merged_sessions_hold_both_texts(rule: str) -> None:
    """Of layer 0 neither keys nor targets depend on its writes, so that the sum is exact there."""
    settings = RIDGE if rule == "gate" else RULES[rule]
    model = converted("llama", torch.float64, chunk_size=16, **{**settings, "layers": (0,)})
    texts = [random_ids(2, tokens, seed=tokens) for tokens in (37, 48)]
    apart = []
    for text in texts:
        apart.append(Session(model))
        apart[-1].read(text)
    one = Session(model)
    one.read(texts[0][:, :32])
    one = one.drop_kv_cache()
    one.read(texts[1])
    merged, again = apart[0].merge(apart[1]), apart[1].merge(apart[0])
    assert merged.chunks_written == one.chunks_written == 10 and merged.unwritten == 0
    text = random_ids(2, 9, seed=5)
    assert distance(after(merged, text), after(one, text)) < 1e-9
    assert distance(after(again, text), after(one, text)) < 1e-9
    assert distance(after(apart[0].fork(), text), after(one, text)) > 1e-4


def test_merged_sessions_are_saved(tmp_path: Path) -> None:
    session = read_once("llama", "gradient")
    merged = session.merge(session.fork())
    merged.save(tmp_path / "both.state")
    again = Session.load(tmp_path / "both.state", session.model)
    for index, change in again.weight_changes().items():
        assert distance(change.matrix(), 2 * session.weight_changes()[index].matrix()) < 1e-9


def test_refuses_sessions_that_do_not_add_up() -> None:
    session = read_once("llama", "one write per prompt")
    with pytest.raises(InPlaceTTTError, match="two such writes cannot be added"):
        session.merge(session.fork())
    one, two = (Session(converted("llama")) for _ in range(2))
    with pytest.raises(InPlaceTTTError, match="two models"):
        one.merge(two)
    one.read(random_ids(1, 20))
    other = Session(one.model)
    other.read(random_ids(2, 20))
    with pytest.raises(InPlaceTTTError, match="1 and 2 sequences"):
        one.merge(other)
