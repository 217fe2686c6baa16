"""The head, on what the base read before, in one thread of several."""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, get_ident
from typing import Any

import torch
from models import converted, logits, random_ids
from torch import Tensor

from inplace_ttt import language_head
from inplace_ttt.families import locate
from inplace_ttt.language_head import head_logits

LENGTHS = (30, 24)


class _Stopping:
    """Threads that each stop at the head, until they may go on."""

    def __init__(self, model: Any) -> None:
        self.model, self.pool = model, ThreadPoolExecutor(2)
        self.there, self.on = ({length: Event() for length in LENGTHS} for _ in range(2))
        self.threads: dict[int, int] = {}
        model.lm_head.register_forward_pre_hook(self.stop)

    def stop(self, *_: object) -> None:
        if length := self.threads.get(get_ident()):
            self.there[length].set()
            assert self.on[length].wait(60)

    def head(self, read: Any, ids: Tensor) -> Future[Tensor]:
        def work() -> Tensor:
            self.threads[get_ident()] = ids.shape[1]
            with torch.no_grad():
                return head_logits(self.model, read, read.last_hidden_state, ids)

        started = self.pool.submit(work)
        assert self.there[ids.shape[1]].wait(60)
        return started


def test_other_threads_read_as_ever_and_nothing_is_left() -> None:
    model = converted("llama")
    own = type(model.base_model.forward)
    texts = [random_ids(1, length, seed=length) for length in LENGTHS]
    expected = [logits(model, ids) for ids in texts]
    with torch.no_grad():
        reads = [model.base_model(ids, use_cache=False) for ids in texts]
    stopping = _Stopping(model)
    first = stopping.head(reads[0], texts[0])
    assert torch.equal(logits(model, texts[1]), expected[1])
    second = stopping.head(reads[1], texts[1])
    for length, head, wanted in zip(LENGTHS, (first, second), expected, strict=True):
        stopping.on[length].set()
        assert torch.equal(head.result(60), wanted) and torch.equal(logits(model, texts[1]), expected[1])
    assert "forward" not in vars(model.base_model) and type(model.base_model.forward) is own


def test_the_base_is_looked_for_once(monkeypatch: Any) -> None:
    model, ids, looked = converted("llama"), random_ids(1, 20), []
    read = model.base_model(ids, use_cache=False)
    monkeypatch.setattr(language_head, "locate", lambda lm: looked.append(lm) or locate(lm))
    for hidden, part in zip(read.last_hidden_state.split(5, 1), ids.split(5, 1), strict=True):
        head_logits(model, read, hidden, part)
    assert looked == [model]
