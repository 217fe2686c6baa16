"""Sessions that read, carry on, and are compared with one full forward."""

import copy
from typing import Any

import pytest
import torch
from models import distance, logits, random_ids
from torch import Tensor
from transformers import PreTrainedModel

from inplace_ttt import InPlaceTTTError, Session
from inplace_ttt.families import CACHE
from inplace_ttt.surgery import fast_weights

LONG = 25  # tokens: past the window; three chunks and four tokens
TOLERANCE = 1e-5


@torch.no_grad()
def read(state: Session, ids: Tensor) -> Tensor:
    """Logits of `ids`, read on top of the session."""
    state.tokens = ids if state.tokens is None else torch.cat([state.tokens, ids], dim=1)
    return state.model(input_ids=ids, **{CACHE: state.cache}).logits


def session(model: PreTrainedModel, ids: Tensor, cache: Any = None) -> Session:
    state = Session(model, cache)
    read(state, ids)
    return state


def carry_on(state: Session, new: int = 12) -> Tensor:
    """Some more text, then generated tokens: all their logits. The session's tokens grow by what was read."""
    scores = [read(state, random_ids(len(state.tokens), 3, seed=5))]
    for _ in range(new):
        scores.append(read(state, scores[-1][:, -1:].argmax(-1)))
    return torch.cat(scores, dim=1)


def assert_true(model: PreTrainedModel, state: Session, scores: Tensor) -> None:
    """The scores of the session's last tokens are those of one full forward without a cache."""
    assert distance(scores, logits(model, state.tokens)[:, -scores.shape[1] :]) < TOLERANCE


def assert_refused(refusal: pytest.ExceptionInfo[InPlaceTTTError], *words: str) -> None:
    message = str(refusal.value)
    assert "\n" not in message and all(word in message for word in words), message


def other_weights(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    next(iter(fast_weights(other).values())).ttt.proj.data[0, 0] += 0.1
    return other
