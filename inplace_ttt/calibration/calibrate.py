"""Measures the calibrated tensors of a converted model on a text, and sets them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..checkpoint.layer_tensors import LayerTensors
from ..checkpoint.loading import load_base
from ..checkpoint.reading import Checkpoint
from ..config import InPlaceTTTConfig, KeyWhitening
from ..errors import InPlaceTTTError
from ..families import locate
from ..layer.fast_linear import FastWeight
from ..ops.precision import emulated
from ..surgery import config_of, convert, disable_ttt, fast_weights
from .activations import Seen, feeling, seeing
from .directions import Directions, LeadingDirections
from .gradient_scale import gradient_scales
from .initial_projection import initial_projections

CALIBRATION_TOKENS = 32_768
"""Default number of tokens that a calibration reads.

With 1,536 directions, so many tokens determine their variances to within some percent.
"""
_TOKENS_FOR_SCALE = 4096
"""Default number of tokens if the calibration measures only one number per layer."""

_AT_ONCE, _SMALL = 4096, 10**9


def tokens_to_read(config: InPlaceTTTConfig) -> int:
    """Returns the default number of tokens that a calibration of this config reads."""
    return (
        _TOKENS_FOR_SCALE if config.target == "gradient" and config.whitening is None else CALIBRATION_TOKENS
    )


class _Seen:
    """Sums of one layer over the tokens read.

    Attributes:
        directions: directions of the keys; None if they are not whitened.
        source: sum of the target's source x, float32 [d].
        norm: sum of ‖x‖², float32.
        residual: sum over rows of the median ‖residual‖.
        felt: sum over rows of the block's sensitivity (`feeling`).
        tokens: number of tokens.
        rows: number of rows.
    """

    def __init__(self, layer: FastWeight, seen: Seen) -> None:
        zeros = functools.partial(torch.zeros, device=seen.z.device)
        keys, whitening = layer.ttt.keys, layer.fast.config.whitening
        self.directions = (
            None
            if keys is None or whitening is None
            else LeadingDirections(
                keys.directions.shape[1], len(keys.directions), seen.z.device, centered=whitening.centered
            )
        )
        self.source, self.norm, self.residual, self.felt = (
            zeros(seen.source.shape[-1]),
            zeros(()),
            zeros(()),
            zeros(()),
        )
        self.tokens = self.rows = 0

    def add(self, seen: Seen, felt: Tensor) -> None:
        x = seen.source.flatten(0, -2).float().to(self.source.device)
        if self.directions is not None:
            self.directions.add(seen.z)
        self.source += x.sum(0)
        self.norm += x.square().sum()
        self.residual += seen.stream.float().norm(dim=-1).median().to(self.residual.device)
        self.felt += felt.to(self.felt.device)
        self.tokens, self.rows = self.tokens + len(x), self.rows + 1


@torch.no_grad()
def calibrate(model: Any, rows: Sequence[Tensor], *, progress: bool = False) -> None:
    """Measures the tensors that a converted model's extensions need, and sets them in place.

    Call it if `config.needs_calibration` is True. The rows are read with TTT off. For a gradient target or a
    calibrated P they are read again, with a backward pass.

    Args:
        model: a converted model.
        rows: token ids [1, T], int64, of a text that resembles the texts to be read. About 32,768 tokens in
            all are enough.
        progress: show a bar on stderr.

    Raises:
        InPlaceTTTError: if the model is not converted, its config needs no calibration, or `rows` is empty.
            Also if hidden states are not finite, or the target's source is constant over the text.

    Examples:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, calibrate, convert
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> config = InPlaceTTTConfig.preset("ridge", chunk_size=16)
        >>> model = convert(AutoModelForCausalLM.from_config(small), config)
        >>> calibrate(model, [torch.randint(32000, (1, 200))])  # random tokens, in place of a text
    """
    config = config_of(model)
    if not config.needs_calibration:
        raise InPlaceTTTError(
            "this config lacks extensions that are measured on a text, so calibration would do nothing; "
            "leave it out."
        )
    if not rows:
        raise InPlaceTTTError(
            "there is nothing to calibrate on; give rows of a text like the one to be read."
        )
    rows = [row.to(model.device) for row in rows]
    layers = fast_weights(model)
    over_text: dict[int, _Seen] = {}
    with disable_ttt(model), seeing(model) as found, feeling(model) as felt:
        for row in tqdm(rows, desc="calibrating", file=sys.stderr, disable=None if progress else True):
            if not locate(model).base(row, use_cache=False).last_hidden_state.isfinite().all():
                raise InPlaceTTTError(
                    "the model's hidden states are not finite on the calibration text; its weights are "
                    "damaged, or their dtype is too narrow."
                )
            for index, seen in found.items():
                over_text.setdefault(index, _Seen(layers[index], seen)).add(seen, felt[index])
    vocabulary = (
        _mean_embedding(model) if config.normalize_targets and config.target == "embeddings" else None
    )
    for index, layer in layers.items():
        _set(layer, over_text[index], config.whitening, vocabulary)
    if config.target == "gradient":
        for index, gain in gradient_scales(model, rows, config.chunk_size, progress=progress).items():
            layers[index].ttt.get_buffer("gain").fill_(gain)
    if config.proj_init == "calibrated":
        for index, proj in initial_projections(model, rows, progress=progress).items():
            layers[index].ttt.proj.copy_(proj)


@dataclass
class BaseToMeasure:
    """A base that is loaded once for all measurements on it.

    Attributes:
        model: the base.
        dtype: dtype of its weights on disk.
    """

    model: PreTrainedModel
    dtype: torch.dtype

    @classmethod
    def load(cls, checkpoint: Checkpoint, device: str = "cpu") -> BaseToMeasure:
        """Loads the base onto a device.

        On a CPU that only emulates the base's dtype, a small model is measured in float32. That is several
        times faster.
        """
        base = load_base(checkpoint.folder)
        dtype = base.dtype
        if getattr(base, "is_quantized", False):  # its loader has already placed it on a device
            return cls(base, dtype)
        if device == "cpu" and emulated(dtype) and base.num_parameters() < _SMALL:
            base = base.float()
        return cls(base.to(device), dtype)

    def new_tensors(self, config: InPlaceTTTConfig, rows: Sequence[Tensor]) -> LayerTensors:
        """Converts the base, and returns the calibrated tensors of a fresh conversion, by layer index."""
        model = convert(self.model, config)
        calibrate(model, rows, progress=True)
        return self.to_save({i: layer.ttt.state_dict() for i, layer in fast_weights(model).items()})

    def to_save(self, tensors: Mapping[int, Mapping[str, Tensor]]) -> LayerTensors:
        """Returns tensors by layer index and name as they are saved: on the CPU, in the base's dtype."""
        return {i: {kind: x.to("cpu", self.dtype) for kind, x in of.items()} for i, of in tensors.items()}


def _mean_embedding(model: Any) -> Tensor:
    """Returns the mean embedding over the vocabulary, float32 [d], each token counted once.

    With a mean over a text, the difference between the text's own words and others would be lost.
    """
    table = model.get_input_embeddings()
    ids = torch.arange(table.num_embeddings, device=table.weight.device)
    return torch.stack([table(part).float().sum(0) for part in ids.split(_AT_ONCE)]).sum(0) / len(ids)


def _set(
    layer: FastWeight, over_text: _Seen, whitening: KeyWhitening | None, vocabulary: Tensor | None
) -> None:
    """Sets a layer's mean, gain and whitening from its sums."""
    if layer.ttt.mean is not None and layer.ttt.gain is not None:
        seen = over_text.source / over_text.tokens
        mean = seen if vocabulary is None else vocabulary
        size = (over_text.norm / over_text.tokens - 2 * seen @ mean + mean @ mean).clamp(min=0).sqrt()
        if not size > 0:
            raise InPlaceTTTError(
                "the target's source did not vary over the calibration text; give rows of a text like the "
                "one to be read."
            )
        layer.ttt.mean.copy_(mean)
        layer.ttt.gain.copy_(over_text.residual / over_text.felt / size)
    if layer.ttt.keys is not None and whitening is not None and over_text.directions is not None:
        found = over_text.directions.found()
        layer.ttt.keys.directions.copy_(whitened(found, whitening.shrinkage))
        layer.ttt.keys.center.copy_(found.center)


def whitened(found: Directions, shrinkage: float) -> Tensor:
    """Returns A = s (Λ + ρI)^(-1/2) Uᵀ [r, h], the map of `WhitenedKeys`.

    The scale s makes the mean of ‖A(z - ‖z‖c)‖² one.
    """
    shares = 1 / (found.values + shrinkage * found.trace / len(found.center))
    return ((found.values * shares).sum().rsqrt() * shares.sqrt())[:, None] * found.vectors.T
