"""What lets ranks share packed rows, and the mask that plain sdpa then needs."""

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig

from inplace_ttt import InPlaceTTTError
from inplace_ttt.training.recipe.recipe import Recipe
from inplace_ttt.training.ulysses import check_sharing, document_mask

from .recipes import tiny_recipe


def shared_by(ranks: int, folder: Path) -> Recipe:
    parallel = {"nproc_per_node": ranks, "sequence_parallel_size": ranks}
    return tiny_recipe(
        folder, f"data.sequence_length={16 * ranks}", parallel=parallel, monitor={"save_steps": ranks}
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 12])
def test_heads_that_ranks_cannot_share(ranks: int, tmp_path: Path) -> None:
    config = MistralConfig(hidden_size=96, num_attention_heads=12, num_key_value_heads=4)
    if ranks in (1, 2, 4, 12):
        check_sharing(shared_by(ranks, tmp_path), 16, config)
        return
    with pytest.raises(
        InPlaceTTTError,
        match=f"sequence_parallel_size {ranks} does not divide the model's 12 attention heads and 4 key-value",
    ):
        check_sharing(shared_by(ranks, tmp_path), 16, config)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_mask_against_its_definition(window: int | None) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    mask = document_mask(positions, window)
    assert mask is not None
    starts = [[0, 0, 0, 3, 3, 5, 6, 6, 6, 6], [0] * 10]
    for row in range(2):
        for query in range(10):
            for key in range(10):
                sees = starts[row][key] == starts[row][query] and 0 <= query - key < (window or 99)
                assert bool(mask[row, 0, query, key]) == sees


def test_one_document_needs_no_mask() -> None:
    positions = torch.arange(10)[None]
    assert document_mask(positions, None) is None and document_mask(positions, 10) is None
    assert document_mask(positions, 4) is not None
