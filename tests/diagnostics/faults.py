"""Faults in the layer itself, planted in a healthy little model: ways of the gradient, own chunks, W0, signs,
sizes, broken weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from models import RIDGE
from torch import Tensor, nn

from inplace_ttt.layer import fast_linear
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.surgery import fast_weights

from .sick import Sick, changed, half_precision, healthy, long_rows

Op = Callable[..., Any]


def op_through(change: Callable[..., Any]) -> Callable[[], Any]:
    """A patch under which layers call another op, which gets the real one first."""

    @contextmanager
    def within() -> Iterator[None]:
        real = fast_linear.fast_weight
        with patch.object(fast_linear, "fast_weight", lambda *args, **kwargs: change(real, *args, **kwargs)):
            yield

    return within


def detached(real: Op, z: Tensor, *args: Any, **kwargs: Any) -> Any:
    return real(z.detach(), *args, **kwargs)


def detached_beside_w0(real: Op, z: Tensor, v: Tensor, w0: Tensor | None, **kwargs: Any) -> Any:
    """The keys' product with W0 has its gradient, the fast weight's has none."""
    return added(real(z.detach(), v, None, **kwargs), z, w0)


def without_w0(real: Op, z: Tensor, v: Tensor, w0: Tensor | None, **kwargs: Any) -> Any:
    return real(z, v, None if w0 is None else w0.detach(), **kwargs)


def added(found: Any, z: Tensor, w0: Tensor | None) -> Any:
    base = 0 if w0 is None else z @ w0.T
    return (base + found[0], found[1]) if isinstance(found, tuple) else base + found


def by_hand(
    change_read: Callable[[Tensor], Tensor], change_written: Callable[[Tensor], Tensor], own: bool = False
) -> Callable[[], Any]:
    """The rule of the paper with other keys to read with and to write under; own: a chunk reads its own
    write."""

    def op(
        real: Op, z: Tensor, v: Tensor, w0: Tensor | None, *, eta: float, layout: ChunkLayout, **kwargs: Any
    ) -> Any:
        if kwargs.get("return_state"):
            return real(z, v, w0, eta=eta, layout=layout, **kwargs)
        rows = []
        for row, documents in enumerate(layout.documents):
            out = torch.zeros_like(v[row])
            for document in documents:
                state = torch.zeros_like(v[row, :1].T @ z[row, :1])
                for start, stop in layout.chunks(document):
                    delta = v[row, start:stop].T @ change_written(z[row, start:stop])
                    after = state + delta if layout.is_complete((start, stop)) else state
                    read = change_read(z[row, start:stop]) @ (after if own else state).T
                    out = torch.cat([out[:start], eta * read, out[stop:]])
                    state = after
            rows.append(out)
        return added(torch.stack(rows), z, w0)

    return op_through(op)


def in_layer(within: Callable[[], Any], index: int) -> Callable[[], Any]:
    """A patch of the op for one layer alone."""

    @contextmanager
    def one() -> Iterator[None]:
        own, real = fast_linear.fast_weight, FastWeight._fast

        def fast(self: FastWeight, *args: Any) -> Tensor:
            with within() if self.fast.layer == index else patch.object(fast_linear, "fast_weight", own):
                return real(self, *args)

        with patch.object(FastWeight, "_fast", fast):
            yield

    return one


def same(keys: Tensor) -> Tensor:
    return keys


def only(layer_of_fault: int, change: Callable[[FastWeight], None]) -> Callable[[], nn.Module]:
    """A model with one layer changed."""
    return lambda: changed(lambda model, layer, index: change(layer) if index == layer_of_fault else None)


def every(change: Callable[[FastWeight], None], **config: Any) -> Callable[[], nn.Module]:
    return lambda: changed(lambda model, layer, index: change(layer), **config)


def negative(factor: float) -> Callable[[FastWeight], None]:
    return lambda layer: layer.ttt.proj.copy_(-factor * torch.eye(len(layer.ttt.proj)))  # type: ignore[func-returns-value]


def entry(name: str, number: float) -> Callable[[FastWeight], None]:
    return lambda layer: layer.get_parameter(name).view(-1)[3:5].fill_(number)  # type: ignore[func-returns-value]


def conv_of(size: float) -> Callable[[FastWeight], None]:
    return lambda layer: layer.ttt.conv.mul_(size / 0.003)  # type: ignore[func-returns-value]


def frozen(layer: FastWeight) -> None:
    layer.weight.requires_grad_(False)


def ridge() -> nn.Module:
    return healthy(**RIDGE)


@torch.no_grad()
def what_the_other_sign_says() -> dict[str, Tensor]:
    """Labels that are likeliest with the writes' sign turned, so that turned writes help and the model's own
    hurt."""
    model, batch = every(negative(2.0))(), long_rows()
    for layer in fast_weights(model).values():
        layer.fast.eta *= -1
    likeliest = model(**batch, use_cache=False).logits.argmax(-1)
    return {**batch, "labels": torch.cat([batch["input_ids"][:, :1], likeliest[:, :-1]], 1)}


FAULTS: dict[str, Sick] = {
    "keys detached": Sick("keys-detached", healthy, within=op_through(detached)),
    "keys detached beside W0": Sick("keys-detached", healthy, within=op_through(detached_beside_w0)),
    "keys detached in bfloat16": Sick("keys-detached", half_precision, within=op_through(detached_beside_w0)),
    "whitened keys detached": Sick("keys-detached", ridge, within=op_through(detached)),
    "keys detached in a layer": Sick(
        "keys-detached", healthy, layers=(2,), within=in_layer(op_through(detached), 2)
    ),
    "keys detached where they write": Sick("keys-detached", healthy, within=by_hand(same, Tensor.detach)),
    "keys detached where they read": Sick("keys-detached", healthy, within=by_hand(Tensor.detach, same)),
    "a chunk that reads its own write": Sick("own-chunk-read", healthy, within=by_hand(same, same, own=True)),
    "a chunk of one layer that reads its own write": Sick(
        "own-chunk-read", healthy, layers=(0,), within=in_layer(by_hand(same, same, own=True), 0)
    ),
    "W0 detached": Sick("weight-detached", healthy, within=op_through(without_w0)),
    "W0 frozen": Sick("weight-frozen", every(frozen)),
    "W0 frozen in a layer": Sick("weight-frozen", only(2, frozen), layers=(2,)),
    "P = -2 I": Sick("writes-turned-round", every(negative(2.0)), severity="warning"),
    "P = -0.5 I in a layer": Sick(
        "writes-turned-round", only(0, negative(0.5)), severity="warning", layers=(0,)
    ),
    "writes of the other sign would help": Sick(
        "writes-turned-round", every(negative(2.0)), batch=what_the_other_sign_says
    ),
    "infinity in P of a layer": Sick(
        "weight-not-finite", only(2, entry("ttt.proj", float("inf"))), layers=(2,)
    ),
    "NaN in conv of a layer": Sick(
        "weight-not-finite", only(0, entry("ttt.conv", float("nan"))), layers=(0,)
    ),
    "infinity in W0 of a layer": Sick(
        "weight-not-finite", only(2, entry("weight", float("-inf"))), layers=(2,)
    ),
    "conv of 1e-7": Sick("conv-too-small", every(conv_of(1e-7)), severity="warning"),
    "conv of 1e-9": Sick("conv-too-small", every(conv_of(1e-9)), severity="warning"),
    "conv of 1e-6 in a layer": Sick(
        "conv-too-small", only(0, conv_of(1e-6)), severity="warning", layers=(0,)
    ),
}
