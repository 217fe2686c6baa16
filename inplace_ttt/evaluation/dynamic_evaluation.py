"""Dynamic evaluation, the rival without fast weights: gradient descent on the weights themselves.

The down-projections of the model's TTT layers take one step of plain gradient descent per chunk, on the mean
loss of the chunk's predicted tokens. A chunk is scored before its own step. Each document
begins with the base's weights. None of the package's code for fast weights is used: a hook per layer adds
the change of its weight, which is a separate float32 tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel

from ..attention_window import attention_window
from ..families import CACHE, features
from ..layer.overrides import overriding
from ..surgery import config_of, disable_ttt, fast_weights
from .comparison import Comparison, DocumentLosses, lenders
from .protocol import Protocol, progress_bar
from .token_losses import Progress, reading_cache


def dynamic_evaluation(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    known: Comparison,
    rates: Sequence[float],
    *,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Reads documents by dynamic evaluation, each also with the weights that another document left.

    Args:
        model: a converted model; its writes are off.
        documents: token ids [T] of each document.
        known: losses of these documents with the model's own writes on and off, by the same protocol.
        rates: learning rates to try.
        progress: show a bar on stderr.

    Returns:
        For each rate a JSON object: `rate`; `loss` in nats per token; `difference`, its loss minus that of
        the unchanged weights; `document_gain`, its loss minus that under another document's weights (None for
        a single document); `on_minus_dynamic`, the model's own loss minus this one. The last three are means
        over documents with standard errors.
    """
    found, protocol = [], known.protocol
    lender = lenders(documents) if len(documents) > 1 else {}
    reader = {other: own for own, other in lender.items()}
    tokens = sum(map(len, documents)) * len(rates) * (2 if lender else 1)
    with progress_bar("dynamic evaluation", tokens, progress) as bar:
        for rate in rates:
            own: dict[int, Tensor] = {}
            mismatched: dict[int, Tensor] = {}
            for place, document in enumerate(documents):
                rows = document[None]
                if lender:
                    other = documents[reader[place]]
                    rows = torch.nn.utils.rnn.pad_sequence([document, other], batch_first=True)
                    rows = rows[:, : len(document) + 1]
                losses = descent_losses(model, rows, rate, protocol, progress=bar.update)
                own[place] = losses[0, : len(document) - 1]
                if lender:
                    mismatched[reader[place]] = losses[1, : len(other) - 1]
            found.append(_compared(rate, known, own, mismatched))
    return found


def _compared(
    rate: float, known: Comparison, own: dict[int, Tensor], mismatched: dict[int, Tensor]
) -> dict[str, Any]:
    def beside(reading: str, losses: Sequence[Tensor]) -> Comparison:
        """Returns a comparison: the losses as "on", and the known losses of a reading as "off"."""
        return Comparison(
            [
                DocumentLosses(one, getattr(known.documents[place], reading), mismatched.get(place))
                for place, one in enumerate(losses)
            ],
            known.protocol,
        )

    losses = [own[place] for place in range(len(own))]
    rival, beside_on = beside("off", losses), beside("on", losses)
    pairs = {
        "difference": rival.paired("on", "off"),
        "document_gain": rival.paired("on", "mismatched"),
        "on_minus_dynamic": beside_on.paired("off", "on"),
    }
    return {
        "rate": rate,
        "loss": rival.mean("on"),
        **{name: None if pair is None else vars(pair) for name, pair in pairs.items()},
    }


def descent_losses(
    model: PreTrainedModel,
    rows: Tensor,
    rate: float,
    protocol: Protocol,
    *,
    progress: Progress = lambda tokens: None,
) -> Tensor:
    """Reads a document while gradient descent changes the weights, and other rows with the same weights.

    Args:
        model: a converted model; its writes are off.
        rows: token ids [B, T]; the first row is the document that the weights learn from.
        rate: the learning rate.
        protocol: settings of the reading.
        progress: called with the number of tokens after each chunk.

    Returns:
        Token losses, float32 [B, T - 1] in nats, on the CPU.
    """
    rows, chunk, found = rows.to(model.device), config_of(model).chunk_size, []
    window, sinks = protocol.window, protocol.sinks
    cache = reading_cache(model, window, sinks)
    with (
        disable_ttt(model),
        attention_window(model, window, sinks),
        overriding(model.parameters(), requires_grad=False),
        _changes(model) as changes,
        torch.enable_grad(),
    ):
        for start in range(0, rows.shape[1], chunk):
            here, targets = rows[:, start : start + chunk], rows[:, start + 1 : start + chunk + 1]
            logits = model(input_ids=here, **{CACHE: cache}, use_cache=True).logits.float()
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
            if here.shape[1] == chunk:
                loss = cross_entropy(logits[0, :-1], here[0, 1:])
                for change, gradient in zip(changes, torch.autograd.grad(loss, changes), strict=True):
                    change.data -= rate * gradient
            with torch.no_grad():
                scores = logits[:, : targets.shape[1]].flatten(0, 1)
                found.append(
                    cross_entropy(scores, targets.flatten(), reduction="none").view_as(targets).cpu()
                )
            progress(here.numel())
    return torch.cat(found, 1)


@contextmanager
def _changes(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yields the change [d, h] of each TTT layer's down-projection, zero at first, which hooks add."""
    changes = []
    with ExitStack() as stack:
        for layer in fast_weights(model).values():
            h, d = features(layer)
            change = torch.zeros(d, h, device=model.device, requires_grad=True)
            changes.append(change)
            handle = layer.register_forward_hook(
                lambda module, args, out, change=change: out + linear(args[0], change.to(out.dtype))
            )
            stack.callback(handle.remove)
        yield changes
