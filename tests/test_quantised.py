"""A 4-bit base: the additive form over a down-projection whose weight nobody can read."""

from pathlib import Path

import pytest
import torch
from families import build
from models import distance, logits, random_ids, streamed, turn_writer_on
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from inplace_ttt import DeltaClip, FastWeightState, InPlaceTTTConfig, InPlaceTTTError, convert, revert


@pytest.fixture
def base(tmp_path: Path) -> PreTrainedModel:
    build("llama", hidden_size=64, intermediate_size=128, head_dim=32, vocab_size=128).save_pretrained(tmp_path)
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four_bit, dtype=torch.float32, device_map="cpu").eval()


def test_four_bit_base(base: PreTrainedModel, tmp_path: Path) -> None:
    ids = random_ids(1, 40)
    before, plain = logits(base, ids), type(base.model.layers[0].mlp.down_proj)
    assert plain.__name__ == "Linear4bit"
    split_of_the_base = distance(streamed(base, ids, [10, 1, 29]), before)  # the library's kernels depend on the row count
    model = convert(base, InPlaceTTTConfig(layers=(0, 2), chunk_size=7))
    assert torch.equal(logits(model, ids), before)
    turn_writer_on(model)
    whole = logits(model, ids)
    assert distance(whole, before) > 0.05
    state = FastWeightState(model)
    with torch.no_grad():
        parts = [model(piece, past_key_values=state.cache).logits for piece in ids.split([10, 1, 29], 1)]
    assert distance(torch.cat(parts, 1), whole) < 3 * split_of_the_base + 1e-5
    state.save(tmp_path / "state")
    assert FastWeightState.load(tmp_path / "state", model).chunks_written == 5
    assert torch.equal(logits(revert(model), ids), before)
    assert type(model.model.layers[0].mlp.down_proj) is plain


def test_the_writer_learns_on_a_four_bit_base(base: PreTrainedModel) -> None:
    model = convert(base, InPlaceTTTConfig(layers=(1,), chunk_size=7))
    ids = random_ids(1, 40)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.model.layers[1].mlp.down_proj.ttt.conv.grad.abs().max() > 0


def test_a_relative_clip_is_refused(base: PreTrainedModel) -> None:
    model = convert(base, InPlaceTTTConfig(layers=(1,), chunk_size=7, clip=DeltaClip(0.1, relative=True)))
    with pytest.raises(InPlaceTTTError, match="Linear4bit does not show; use an absolute tau"):
        logits(model, random_ids(1, 40))
