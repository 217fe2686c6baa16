"""Changes the TTT layers of a converted model for the probes, and restores them.

A borrowed layer has short chunks, parameters copied to a wide dtype, and the probe's target generator. All
its writes have weight 1. The gate of writes is compared with its declaration only in readings by whole
models. On exit every object is the same as before, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..errors import InPlaceTTTError
from ..families import features, locate
from ..layer.fast_linear import FastWeight
from ..layer.hooks import sharing, switching
from ..layer.overrides import overriding, with_config
from ..layer.quantized import readable_parameters
from ..surgery import causal_lm, fast_weights
from .converted import ConvertedLayer


def probe_chunk(kernel: int) -> int:
    """Returns a short chunk size for the probes, in tokens.

    The middle of such a chunk is out of reach of the convolution's padding. The chunk is also long enough to
    be read in pieces.
    """
    return max(8, 2 * (kernel - 1) + 4)


@contextmanager
def borrowed(model: nn.Module, index: int) -> Iterator[ConvertedLayer]:
    """Yields the TTT layer `index` as an `AuditedModule` in float64; a quantized layer keeps its dtype."""
    lm = causal_lm(model)
    layer = fast_weights(lm)[index]
    own, decoder = layer.fast.config, locate(lm)
    plain = len(list(readable_parameters(layer))) == len(list(layer.parameters()))
    with (
        overriding([decoder.base], training=False),  # in training mode it would search for ranks
        _restored(layer),
        with_config([layer], chunk_size=probe_chunk(own.kernel_size)),
    ):
        if plain:
            for parameter in layer.parameters():
                parameter.data = parameter.data.to(torch.float64, copy=True)
        else:
            for parameter in layer.ttt.parameters():
                parameter.data = parameter.data.clone()
        if layer.ttt.gate is not None:
            layer.ttt.gate.data.zero_()
        yield ConvertedLayer(lm, decoder, index, torch.float64 if plain else lm.dtype, own.chunk_size)


@contextmanager
def _restored(layer: FastWeight) -> Iterator[None]:
    """Restores the layer's parameters, config and modes on exit."""
    data = [(p, p.data) for _, p in readable_parameters(layer)]
    with (
        overriding(layer.modules(), training=False),
        overriding([layer.ttt], gain=layer.ttt.gain),
        overriding([layer.fast], observer=None, config=layer.fast.config),
        sharing([layer.hooks.model], None),
        switching([layer.hooks.model], enabled=True),
    ):
        try:
            yield
        finally:
            for parameter, tensor in data:
                parameter.data = tensor


@contextmanager
def small_chunks(model: nn.Module, chunk_size: int, seed: int | None) -> Iterator[None]:
    """Sets short chunks, no clip and evaluation mode on the model inside the context.

    `prompt_write` is off, so sessions write the chunks that they read.

    Args:
        model: a converted model.
        chunk_size: tokens per chunk.
        seed: seed of a random conv, P and gate of writes; None leaves the model's own.
    """
    layers = fast_weights(causal_lm(model))
    generator = torch.Generator().manual_seed(seed or 0)
    with ExitStack() as stack:
        stack.enter_context(overriding(model.modules(), training=False))
        for layer in layers.values():
            stack.enter_context(_restored(layer))
            stack.enter_context(with_config([layer], chunk_size=chunk_size, clip=None, prompt_write=None))
            if seed is None:
                continue
            small = 0.1 / features(layer)[1] ** 0.5
            for parameter, size in ((layer.ttt.conv, 0.1), (layer.ttt.proj, small), (layer.ttt.gate, 1.0)):
                if parameter is not None:
                    parameter.data = (size * torch.randn(parameter.shape, generator=generator)).to(parameter)
        yield


def refuse_unreachable(model: nn.Module) -> None:
    """Raises InPlaceTTTError for a model whose weights are not in this process.

    Such weights are on the meta device, or partitioned over ranks.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" or parameter.numel() == 0:
            raise InPlaceTTTError(
                f"the weights of {name} are not in this process (offloaded or partitioned); audit the model "
                "before it is offloaded or partitioned."
            )
