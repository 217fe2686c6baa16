"""All layers of a forward use one layout, so that its chunk numbers reach the device once; in streaming
too."""

import pytest
import torch
from models import CHUNK, converted, gradients, random_ids, streamed
from transformers import DynamicCache

from inplace_ttt.families import CACHE
from inplace_ttt.layout import ChunkLayout


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that chunk numbers are made."""
    ChunkLayout.shared.cache_clear()
    entries: list[int] = []
    full = torch.full

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        if kwargs.get("dtype") is torch.int32 and args[1:2] == (-1,):
            entries.append(1)
        return full(*args, **kwargs)

    monkeypatch.setattr("inplace_ttt.layout.torch.full", counted)
    return entries


@pytest.mark.parametrize("layers", [(0,), (0, 1, 2)])
def test_one_layout_for_all_layers(layers: tuple[int, ...], made: list[int]) -> None:
    model, ids = converted("llama", layers=layers), random_ids(2, 5 * CHUNK + 3)
    gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    assert len(made) == 1


@pytest.mark.parametrize("layers", [(0,), (0, 1, 2)])
def test_one_layout_for_all_chunks_of_a_stream(layers: tuple[int, ...], made: list[int]) -> None:
    """One of the whole chunks taken together, one of a chunk alone."""
    streamed(
        converted("llama", layers=layers),
        random_ids(2, 8 * CHUNK),
        [5 * CHUNK + 3, 2, *[1] * (2 * CHUNK), CHUNK - 5],
    )
    assert len(made) == 2


def test_a_layout_made_in_inference_mode_serves_outside_of_it() -> None:
    model, ids = converted("llama"), random_ids(1, 3 * CHUNK)
    with torch.inference_mode():
        expected = model(input_ids=ids, **{CACHE: DynamicCache(config=model.config)}).logits
    with torch.no_grad():
        found = model(input_ids=ids, **{CACHE: DynamicCache(config=model.config)}).logits
    assert torch.equal(expected, found)
