"""The mask that plain sdpa needs where ranks share packed rows."""

import pytest
import torch

from inplace_ttt.training.attention import document_mask


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
