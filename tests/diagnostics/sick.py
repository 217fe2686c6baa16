"""A healthy little model, and the same with one thing wrong: what is planted, and what must be found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from families import build
from models import converted, random_ids
from torch import Tensor, nn

from inplace_ttt import InPlaceTTTConfig, UpdateClip, convert
from inplace_ttt.diagnostics.gradients import Rates
from inplace_ttt.layer import fast_linear
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.surgery import fast_weights

CHUNK, ROW = 7, 50


def rows(length: int = ROW, **more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": random_ids(2, length), **more}


def healthy(**config: Any) -> nn.Module:
    """Layers 0 and 2 of three, chunks of 7, conv and P on."""
    return converted("llama", **config)


@dataclass(frozen=True)
class Sick:
    """planted: the cause, by id. layers: where. batch: rows. within: what else is wrong while the model runs.
    rates: of the first step."""

    planted: str
    model: Callable[[], nn.Module]
    severity: str = "severe"
    layers: tuple[int, ...] = (0, 2)
    batch: Callable[[], dict[str, Tensor]] = rows
    within: Callable[[], Any] | None = None
    rates: Rates | float | None = None


@torch.no_grad()
def changed(change: Callable[[nn.Module, FastWeight, int], None], **config: Any) -> nn.Module:
    model = healthy(**config)
    for index, layer in fast_weights(model).items():
        change(model, layer, index)
    return model


def zero(model: nn.Module, layer: FastWeight, index: int) -> None:
    layer.ttt.conv.zero_()
    layer.ttt.proj.zero_()


def frozen_p(model: nn.Module, layer: FastWeight, index: int) -> None:
    layer.ttt.proj.requires_grad_(False)


def no_embeddings(model: nn.Module, layer: FastWeight, index: int) -> None:
    model.get_input_embeddings().weight.zero_()  # type: ignore[operator]


def half_state_model() -> nn.Module:
    return healthy(eta=1.0).to(torch.bfloat16)


@contextmanager
def half_state() -> Iterator[None]:
    """A stream whose state is in bfloat16, as in the reference code."""
    real = FastWeight.write

    def rounded(
        self: FastWeight, z: Tensor, x: Tensor, layout: ChunkLayout, state: Tensor | None, *, reads: bool
    ) -> Any:
        read, after = real(self, z, x, layout, None if state is None else state.float(), reads=reads)
        return read, after.to(torch.bfloat16)

    with patch.object(FastWeight, "write", rounded):
        yield


@contextmanager
def generator_without_graph() -> Iterator[None]:
    real = TargetGenerator.forward

    def detached(self: TargetGenerator, *args: Any) -> Tensor:
        return real(self, *args).detach()

    with patch.object(TargetGenerator, "forward", detached):
        yield


def padded() -> dict[str, Tensor]:
    """Rows of 50 tokens of which 6 are text."""
    mask = torch.zeros(2, ROW, dtype=torch.int64)
    mask[:, -6:] = 1
    return rows(attention_mask=mask)


def packed_short() -> dict[str, Tensor]:
    """Rows of 50 tokens that hold ten documents of 5."""
    return rows(position_ids=(torch.arange(ROW) % 5).expand(2, ROW))


def at_the_papers_start(**config: Any) -> nn.Module:
    return convert(build("llama"), InPlaceTTTConfig(layers=(0, 2), chunk_size=CHUNK, **config))


@torch.no_grad()
def tiny_p() -> nn.Module:
    model = at_the_papers_start()
    for layer in fast_weights(model).values():
        layer.ttt.proj.mul_(1e-6)
    return model


@torch.no_grad()
def loud_last() -> nn.Module:
    """The same function, but the last layer's keys are 30 times as large: the gradient of its conv goes with
    their square."""
    model = at_the_papers_start()
    mlp = model.model.layers[2].mlp  # type: ignore[union-attr, index]
    mlp.up_proj.weight.mul_(30)
    mlp.down_proj.weight.div_(30)
    return model


@torch.no_grad()
def both_small() -> nn.Module:
    """eta and P too small for the gradient, each of them by itself."""
    model = at_the_papers_start(eta=1e-5)
    for layer in fast_weights(model).values():
        layer.ttt.proj.mul_(1e-5)
    return model


@torch.no_grad()
def zero_in_one_chunk() -> nn.Module:
    """Two causes, of which neither's removal alone helps."""
    return changed(zero)


@torch.no_grad()
def told_apart() -> dict[str, Tensor]:
    """Labels that the healthy model itself thinks likeliest, so that it has something to lose."""
    ids = random_ids(2, ROW)
    likeliest = healthy()(input_ids=ids, use_cache=False).logits.argmax(-1)
    return {"input_ids": ids, "labels": torch.cat([ids[:, :1], likeliest[:, :-1]], 1)}


def first_chunks_labeled() -> dict[str, Tensor]:
    ids = random_ids(2, ROW)
    labels = torch.full_like(ids, -100)
    labels[:, :CHUNK] = ids[:, :CHUNK]
    return {"input_ids": ids, "labels": labels}


def first_chunks_of_documents_labeled() -> dict[str, Tensor]:
    ids, positions = random_ids(2, 48), (torch.arange(48) % 24).expand(2, 48)
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": torch.where((positions > 0) & (positions < CHUNK), ids, -100),
    }


def same_embeddings(model: nn.Module, layer: FastWeight, index: int) -> None:
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    table.copy_(table.mean(0).expand_as(table))


def drowned_embeddings(model: nn.Module, layer: FastWeight, index: int) -> None:
    """A constant thirty times as large as what tells tokens apart."""
    table = model.get_input_embeddings().weight  # type: ignore[operator]
    table.copy_(table / 60 + 1)


def no_keys(model: nn.Module, layer: FastWeight, index: int) -> None:
    if index == 2:
        model.model.layers[2].mlp.up_proj.weight.zero_()  # type: ignore[union-attr, index]


def closed_gates(model: nn.Module, layer: FastWeight, index: int) -> None:
    model.model.layers[index].mlp.gate_proj.weight.zero_()  # type: ignore[union-attr, index]


def rank_one_p(model: nn.Module, layer: FastWeight, index: int) -> None:
    proj = layer.ttt.proj
    proj.copy_(torch.outer(proj[:, 0], proj[0]) / proj[0].norm())


def mean_p(model: nn.Module, layer: FastWeight, index: int) -> None:
    if index == 0:
        layer.ttt.proj.copy_(torch.full_like(layer.ttt.proj, 0.1))


def one_channel(model: nn.Module, layer: FastWeight, index: int) -> None:
    layer.ttt.conv[1:] = 0


def no_eta(model: nn.Module, layer: FastWeight, index: int) -> None:
    if index == 2:
        layer.fast.eta = 0.0


def source_through(change: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    """A patch under which every layer's target reads something else."""

    @contextmanager
    def within() -> Iterator[None]:
        real = FastWeight._source

        def source(self: FastWeight, *args: Any) -> Tensor:
            return change(real(self, *args))

        with patch.object(FastWeight, "_source", source):
            yield

    return within


def scan_through(change: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    """A patch under which the op gets other targets: the same numbers, another gradient."""

    @contextmanager
    def within() -> Iterator[None]:
        real = fast_linear.fast_weight

        def op(z: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            return real(z, change(v), *args, **kwargs)

        with patch.object(fast_linear, "fast_weight", op):
            yield

    return within


def half_precision() -> nn.Module:
    return healthy().to(torch.bfloat16)


ODD = 7
"""A token."""


def long_rows() -> dict[str, Tensor]:
    return rows(400)


@torch.no_grad()
def one_token_spoiled() -> nn.Module:
    """Wherever one token is read, the model says token 0 with layer 2's writes, and loudly."""
    model = healthy(eta=0.1)
    model.lm_head.weight[0] *= 50
    loud, layer, odd = (
        model.lm_head.weight[0].clone(),
        fast_weights(model)[2],
        long_rows()["input_ids"] == ODD,
    )

    def spoil(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + 30 * odd[..., None] * loud if layer.eta > 0 and out.shape[:2] == odd.shape else out

    layer.register_forward_hook(spoil)
    return model


NEW: dict[str, Sick] = {
    "one token's reading spoiled": Sick(
        "few-tokens-hurt", one_token_spoiled, "warning", layers=(2,), batch=long_rows
    ),
    "rate 1": Sick("step-too-large", healthy, batch=told_apart, rates=1.0),
    "rate 3 for P alone": Sick("step-too-large", healthy, batch=told_apart, rates=Rates(5e-6, 3.0, 5e-6)),
    "rate 1 for all but conv and P": Sick(
        "step-too-large", healthy, batch=told_apart, rates=Rates(5e-6, 5e-6, 1.0)
    ),
    "bfloat16 at 5e-6": Sick("updates-rounded", half_precision, severity="warning", rates=5e-6),
    "float16 at 1e-7": Sick(
        "updates-rounded", lambda: healthy().to(torch.float16), severity="warning", rates=1e-7
    ),
    "a source of zeros": Sick("source-zero", healthy, within=source_through(torch.zeros_like)),
    "a source of one number": Sick("source-constant", healthy, within=source_through(torch.ones_like)),
    "a source that is its mean": Sick(
        "source-constant", healthy, within=source_through(lambda x: x.mean(1, keepdim=True).expand_as(x))
    ),
    "embeddings alike": Sick("source-constant", lambda: changed(same_embeddings)),
    "embeddings beside a constant": Sick("source-constant", lambda: changed(drowned_embeddings, eta=0.2)),
    "a layer without keys": Sick("keys-zero", lambda: changed(no_keys), layers=(2,)),
    "gates that are closed": Sick("keys-zero", lambda: changed(closed_gates)),
    "labels in the first chunk": Sick("labels-unread", healthy, batch=first_chunks_labeled),
    "labels in documents' first chunks": Sick(
        "labels-unread", healthy, batch=first_chunks_of_documents_labeled
    ),
    "a stop in the scan": Sick("scan-detached", healthy, within=scan_through(Tensor.detach)),
    "a tenth of the scan's gradient": Sick(
        "scan-detached", healthy, within=scan_through(lambda v: 0.1 * v + 0.9 * v.detach())
    ),
    "the scan's gradient turned round": Sick(
        "scan-detached", healthy, within=scan_through(lambda v: 2 * v.detach() - v)
    ),
    "P of rank one": Sick("projection-collapsed", lambda: changed(rank_one_p)),
    "P of one number": Sick("projection-collapsed", lambda: changed(mean_p), layers=(0,)),
    "a conv of one channel": Sick("targets-collapsed", lambda: changed(one_channel), severity="warning"),
    "eta 0 in a layer": Sick("eta-too-small", lambda: changed(no_eta), layers=(2,)),
}


SICK: dict[str, Sick] = {
    "clip in training": Sick("clip-saturated", lambda: healthy(clip=UpdateClip(1e-5, mode="always"))),
    "clip at the paper's start": Sick(
        "clip-saturated", lambda: at_the_papers_start(clip=UpdateClip(1e-12, mode="always"))
    ),
    "rows of one chunk": Sick("one-chunk", healthy, batch=lambda: rows(CHUNK)),
    "conv and P both zero": Sick("zero-times-zero", lambda: changed(zero)),
    "eta 1e-6": Sick("eta-too-small", lambda: healthy(eta=1e-6)),
    "eta 0.01": Sick("eta-too-small", lambda: healthy(eta=0.01), severity="warning"),
    "P a millionth of the paper's": Sick("init-too-small", tiny_p),
    "eta 30": Sick("writes-too-large", lambda: healthy(eta=30.0)),
    "detached source": Sick("target-detached", lambda: healthy(detach_target=True), severity="warning"),
    "generator without a graph": Sick("writer-detached", healthy, within=generator_without_graph),
    "frozen P": Sick("writer-frozen", lambda: changed(frozen_p)),
    "bf16 state": Sick("state-precision", half_state_model, within=half_state),
    "padding": Sick("padding", healthy, batch=padded),
    "short packed documents": Sick("padding", healthy, batch=packed_short),
    "last layer dominating": Sick("layer-dominates", loud_last, layers=(2,)),
    "zeroed embeddings": Sick("source-zero", lambda: changed(no_embeddings)),
    **NEW,
}
