"""L3 and L4 by masks made beforehand, [B, H, T, K]: what attention sees as documents and padding, TTT
does."""

import itertools
from typing import Any

import pytest
import torch
from models import CHUNK, converted, distance, logits, random_ids
from torch import Tensor
from transformers import DynamicCache, StaticCache

from inplace_ttt import InPlaceTTTError
from inplace_ttt.families import CACHE
from inplace_ttt.layer.attention_masks import documents_seen

LENGTH = 5 * CHUNK + 3
IDS = random_ids(2, LENGTH)
CAUSAL = torch.ones(LENGTH, LENGTH).tril().bool()
NAMES = ["llama", "gemma3", "gpt2", "olmo3"]


def as_mask(sees: Tensor, kind: str) -> Tensor:
    """bool [B, T, K] as transformers takes it, [B, 1, T, K]."""
    additive = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    return {"bool": sees, "float": additive, "infinite": additive.masked_fill(~sees, -torch.inf)}[kind][
        :, None
    ]


def arguments(model: Any, sees: Tensor, kind: str) -> dict[str, Any]:
    """As `attention_mask`; for a model that has layers with windows too, a mask for each kind of layer."""
    window = getattr(model.config, "sliding_window", None)
    if window is None:
        return {"attention_mask": as_mask(sees, kind)}
    near = ~torch.ones_like(CAUSAL).tril(-window)
    return {
        "attention_mask": {
            "full_attention": as_mask(sees, kind),
            "sliding_attention": as_mask(sees & near, kind),
        }
    }


def left_padded(pads: int, pad_rows: str = "nothing") -> Tensor:
    """Row 0 whole, row 1 with padding at its left, whose rows see nothing, themselves, or everything."""
    sees = CAUSAL.repeat(2, 1, 1)
    sees[1, :, :pads] = False
    sees[1, :pads] = {"nothing": False, "themselves": torch.eye(LENGTH).bool()[:pads], "everything": True}[
        pad_rows
    ]
    return sees


def packed(*lengths: int) -> Tensor:
    return torch.block_diag(*[torch.ones(n, n).tril() for n in lengths]).bool().repeat(2, 1, 1)


# Name, what padding sees, whether position_ids are given; gpt2's are absolute, so that without them padding
# moves the text.
LEFT_PADDED = [
    *itertools.product(NAMES, ["nothing"], [True]),
    *(
        (name, pad_rows, False)
        for name in NAMES
        if name != "gpt2"
        for pad_rows in ("nothing", "themselves", "everything")
    ),
]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("name", "pad_rows", "positions"), LEFT_PADDED)
def test_left_padding(name: str, pad_rows: str, positions: bool, kind: str) -> None:
    model, pads = converted(name), 2 * CHUNK + 2
    sees = left_padded(pads, pad_rows)
    at = {"position_ids": (sees.diagonal(0, 1, 2).cumsum(1) - 1).clamp(min=0)} if positions else {}
    expected = logits(model, IDS[1:, pads:])
    for cached in (False, True):
        found = logits(model, IDS, use_cache=cached, **arguments(model, sees, kind), **at)
        assert distance(found[1, pads:], expected[0]) < 5e-5
        assert distance(found[0], logits(model, IDS)[0]) < 5e-5


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo3"])
def test_right_padding(name: str, kind: str) -> None:
    model, real = converted(name), 3 * CHUNK + 1
    sees = CAUSAL.repeat(2, 1, 1)
    sees[1, :, real:] = False
    found = logits(model, IDS, **arguments(model, sees, kind))
    assert distance(found[1, :real], logits(model, IDS[1:, :real])[0]) < 5e-5


@pytest.mark.parametrize("kind", ["bool", "float", "infinite"])
@pytest.mark.parametrize("lengths", [(17, LENGTH - 17), (1, 1, 2 * CHUNK, LENGTH - 2 * CHUNK - 2), (LENGTH,)])
@pytest.mark.parametrize("name", ["llama", "olmo3", "granite"])
def test_block_diagonal_documents(name: str, lengths: tuple[int, ...], kind: str) -> None:
    model = converted(name)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    found = logits(model, IDS, position_ids=positions, **arguments(model, packed(*lengths), kind))
    expected = torch.cat([logits(model, part) for part in IDS.split(list(lengths), 1)], 1)
    assert distance(found, expected) < 5e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_cache_makes_the_mask_beforehand(name: str) -> None:
    """`generate` with a static cache hands 4-D masks to the model, longer than the text."""
    model = converted(name)
    mask = torch.ones_like(IDS)
    mask[1, : 2 * CHUNK + 1] = 0
    settings: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 2 * CHUNK,
        "do_sample": False,
        "eos_token_id": -1,
    }
    expected = model.generate(IDS * mask, **settings)
    assert torch.equal(
        model.generate(IDS * mask, cache_implementation="static", disable_compile=True, **settings), expected
    )


def test_a_mask_goes_on_with_the_cache() -> None:
    """A later piece's mask covers what is cached as well; of a static cache, places that are not filled yet,
    too."""
    model, pads = converted("llama"), 2 * CHUNK + 2
    sees, expected = left_padded(pads), logits(model, IDS[1:, pads:])
    for cache, room in (
        (DynamicCache(config=model.config), LENGTH),
        (StaticCache(config=model.config, max_cache_len=64), 64),
    ):
        wide = torch.nn.functional.pad(sees, (0, room - LENGTH))
        found = []
        for start, stop in ((0, 9), (9, 20), (20, 21), (21, LENGTH)):
            columns = stop if room == LENGTH else room
            piece = as_mask(wide[:, start:stop, :columns], "bool")
            at = (torch.arange(start, stop) - torch.tensor([[0], [pads]])).clamp(min=0)
            found.append(
                logits(
                    model,
                    IDS[:, start:stop],
                    attention_mask=piece,
                    **{CACHE: cache},
                    position_ids=at,
                    use_cache=True,
                )
            )
        assert distance(torch.cat(found, 1)[1, pads:], expected[0]) < 5e-5


def test_tokens_that_see_later_ones_of_their_document_are_in_it() -> None:
    """Images, say: the tokens of one see each other."""
    sees = CAUSAL.repeat(1, 1, 1).clone()
    sees[0, 4:9, 4:9] = True
    assert documents_seen(sees) == [[(0, LENGTH)]]
    assert documents_seen(torch.ones(1, 5, 5).bool()) == [[(0, 5)]]


def test_a_sliding_window_is_one_document() -> None:
    assert documents_seen((CAUSAL & ~CAUSAL.tril(-4))[None]) == [[(0, LENGTH)]]


TREE = CAUSAL.clone()
TREE[20, 19] = False  # a sibling: it goes on from 18
REFUSED: dict[str, dict[str, Any]] = {
    "a tree": {"attention_mask": as_mask(TREE[None], "bool")},
    "documents and a cache": {"attention_mask": as_mask(packed(17, LENGTH - 17), "bool"), "use_cache": True},
    "positions of documents that the mask does not part": {
        "attention_mask": as_mask(CAUSAL[None], "bool"),
        "position_ids": torch.cat([torch.arange(17), torch.arange(LENGTH - 17)])[None],
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mask_that_shows_no_documents_is_refused(case: str) -> None:
    with pytest.raises(InPlaceTTTError):
        logits(converted("llama"), IDS, **REFUSED[case])
