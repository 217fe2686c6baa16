"""Logits of a few hundred tokens at a time, since all logits of long rows would need most of the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .families import causal_lm, locate
from .layer.hooks import switching
from .layer.installing import hooks_of
from .ops import state_dtype
from .tasks import IGNORED

_AT_ONCE = 1 << 26
"""Number of logits computed at a time. In float32, with their probabilities, they need half a gigabyte."""

_paths: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Path of each model's base. It is kept because a search would visit all modules."""

_changing_forward = Lock()


def tokens_at_once(model: nn.Module, rows: int) -> int:
    """Returns the number of tokens per row whose logits are computed at a time, for this many rows."""
    return max(1, _AT_ONCE // (causal_lm(model).config.get_text_config().vocab_size * rows))


def head_logits(model: nn.Module, read: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Returns the logits of hidden states. It runs the head, and all that the family computes after the head.

    Args:
        model: a causal LM.
        read: any output of the base model.
        hidden: `last_hidden_state` of an output, or some of its tokens [B, n, d].
        ids: the token ids of these hidden states [B, n].

    Returns:
        The logits [B, n, V].
    """
    lm = causal_lm(model)
    # torch multiplies a view into a row as a batch, and copies the head's weight for that
    own = hidden.clone(memory_format=torch.contiguous_format)
    with _having_read(lm, _base_of(lm), type(read)(last_hidden_state=own)):
        return lm(input_ids=ids, use_cache=False).logits


def loss_gradient(lm: nn.Module, read: Any, ids: Tensor) -> Tensor:
    """Returns the gradient of the rows' summed loss at the base model's output.

    It is computed for a few hundred tokens at a time. The loss ends before each row's last token, as its next
    token is unknown.

    Args:
        lm: a causal LM.
        read: an output of its base model.
        ids: the rows' token ids [B, T].

    Returns:
        The gradient [B, T, d].
    """
    size, parts = tokens_at_once(lm, len(ids)), list[Tensor]()
    wanted = pad(ids[:, 1:], (0, 1), value=IGNORED)
    for hidden, tokens, targets in zip(
        *(x.split(size, dim=1) for x in (read.last_hidden_state.detach(), ids, wanted)), strict=True
    ):
        logits = head_logits(lm, read, hidden.requires_grad_(), tokens)
        [part] = torch.autograd.grad(logits, [hidden], _cross_entropy_gradient(logits.detach(), targets))
        parts.append(part.masked_fill_((targets == IGNORED)[..., None], 0))
    return torch.cat(parts, dim=1)


def _cross_entropy_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the probabilities minus 1 at each target, for logits [B, n, V] and target ids [B, n].

    This is the gradient of the summed cross-entropy, without autograd's passes over the logits. The caller
    clears it at ignored targets.
    """
    gradient = logits.to(state_dtype(logits.dtype)).softmax(dim=-1)
    places = targets.where(targets != IGNORED, 0)[..., None]
    gradient.scatter_add_(-1, places, gradient.new_full(places.shape, -1))
    return gradient.to(logits.dtype)


def _base_of(lm: Any) -> nn.Module:
    if lm not in _paths:
        base = locate(lm).base
        _paths[lm] = next(path for path, module in lm.named_modules() if module is base)
    found: nn.Module = lm.get_submodule(_paths[lm])
    return found


class _StandIn:
    """A replacement for a base model's forward.

    It returns a thread's entry of `outputs`. For a thread without an entry it runs the forward as usual.
    """

    def __init__(self, base: nn.Module) -> None:
        update_wrapper(self, base.forward)  # other code inspects the forward's arguments
        self.replaced, self.forward = vars(base).get("forward"), base.forward
        self.outputs: dict[int, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.outputs.get(get_ident())
        return self.forward(*args, **kwargs) if output is None else output


@contextmanager
def _having_read(lm: nn.Module, base: nn.Module, output: Any) -> Iterator[None]:
    """Makes the base model return `output` in this thread. `lm` then runs only the part after the base."""
    with _changing_forward:
        stand_in = vars(base).get("forward")
        if not isinstance(stand_in, _StandIn):
            base.forward = stand_in = _StandIn(base)
        stand_in.outputs[get_ident()] = output
    try:
        with switching(hooks_of(lm), enabled=False):
            yield
    finally:
        with _changing_forward:
            del stand_in.outputs[get_ident()]
            if not stand_in.outputs and stand_in.replaced is not None:
                base.forward = stand_in.replaced
            elif not stand_in.outputs:
                del base.forward
