"""A model with the rows that it is diagnosed on, and forward passes that change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..documents import document_starts
from ..errors import InPlaceTTTError, reported
from ..layer.fast_linear import FastWeight
from ..layer.overrides import seeded
from ..layer.quantized import is_encoded
from ..layer.zero3 import is_partitioned
from ..surgery import fast_weights
from ..tasks import IGNORED

GENERATOR = ("conv", "proj")
Key = tuple[int | None, str]
"""Name of a parameter: (TTT layer, "conv", "proj" or "weight"), or (None, "embeddings")."""


@dataclass(frozen=True)
class DiagnosedModel:
    """A converted model and the rows that it is diagnosed on.

    Attributes:
        module: the model.
        inputs: input_ids [B, T], and attention_mask and position_ids if the batch has them.
        labels: int64 [B, T], not shifted.
        layers: the TTT layers, by index.
        tokenizer: decodes token ids for the findings, or None.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    labels: Tensor
    layers: dict[int, FastWeight] = field(default_factory=dict)
    tokenizer: Any = None

    @classmethod
    def of(cls, model: nn.Module, batch: Mapping[str, Any], tokenizer: Any = None) -> DiagnosedModel:
        """Checks a model and a batch, and returns them together.

        Args:
            model: a converted model.
            batch: input_ids [B, T], and optionally attention_mask, position_ids and labels.
            tokenizer: decodes token ids for the findings, or None.

        Raises:
            InPlaceTTTError: if the model is not converted, its weights or rows are split over processes, or
                the batch does not fit it.
        """
        layers = fast_weights(model)
        if not layers:
            raise InPlaceTTTError(
                f"this {type(model).__name__} is not converted; convert(model, config) it first."
            )
        if any(is_partitioned(p) for p in model.parameters()):
            raise InPlaceTTTError(
                "the weights are partitioned (ZeRO-3), so no single process can diagnose them; use ZeRO 2 or "
                "less."
            )
        if any(layer.hooks.model.group is not None for layer in layers.values()):
            raise InPlaceTTTError(
                "the ranks share these rows, so no single process can diagnose them; diagnose the checkpoint."
            )
        inputs = _as_tensors(batch, next(model.parameters()).device)
        labels = inputs.pop("labels", None)
        ids = inputs["input_ids"]
        rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        if not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            raise InPlaceTTTError(
                f"token ids go from {int(ids.min())} to {int(ids.max())}, but the model has {rows} "
                "embeddings; "
                "the tokenizer is that of another model, so use the tokenizer of this checkpoint."
            )
        if labels is None:
            labels = _own_next_tokens(ids, inputs.get("attention_mask"), inputs.get("position_ids"))
        diagnosed = cls(model, inputs, labels, layers, tokenizer)
        if not bool((diagnosed.next_tokens != IGNORED).any()):
            raise InPlaceTTTError(
                "these rows predict no token, so their loss is undefined; give longer rows, or labels other "
                "than -100."
            )
        return diagnosed

    @property
    def next_tokens(self) -> Tensor:
        """The token that each position predicts, int64 [B, T]; -100 for a position without a prediction."""
        return torch.nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORED)

    def without(self, *names: str) -> DiagnosedModel:
        """Returns a copy without the named inputs. The labels of the copy are its input ids."""
        return replace(
            self,
            inputs={k: v for k, v in self.inputs.items() if k not in names},
            labels=self.inputs["input_ids"],
        )

    def parameters(self) -> dict[Key, nn.Parameter]:
        """Returns conv, P and W0 of every TTT layer, and the embeddings.

        Only floating-point parameters are included. Quantized parameters are left out.
        """
        found: dict[Key, nn.Parameter] = {}
        for index, layer in self.layers.items():
            for name, parameter in layer.ttt.named_parameters():  # under PEFT the trained copy comes last
                found[index, name.rpartition(".")[2]] = parameter
            if layer.matrix() is not None:
                found[index, "weight"] = layer.weight  # type: ignore[assignment]
        found[None, "embeddings"] = self.module.get_input_embeddings().weight  # type: ignore[operator]
        return {key: p for key, p in found.items() if p.is_floating_point() and not is_encoded(p)}

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Sets train or eval mode under a fixed seed; restores all modes and generators afterwards."""
        before = [(module, module.training) for module in self.module.modules()]
        with seeded(self.module, 0):
            self.module.train(training)
            try:
                yield
            finally:
                for module, was in before:
                    module.training = was

    def forward(self, **kwargs: Any) -> Any:
        """Runs a forward pass without a cache."""
        return self.module(**self.inputs, use_cache=False, **kwargs)


def _as_tensors(batch: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Moves a batch's tensors to a device, and checks that each has the shape of the rows."""
    if unknown := sorted(set(batch) - {"input_ids", "attention_mask", "position_ids", "labels"}):
        raise InPlaceTTTError(
            f"a batch to diagnose cannot hold {unknown[0]!r}; give input_ids, attention_mask, position_ids, "
            "labels."
        )
    found = {}
    for name, value in batch.items():
        if value is not None:
            with reported(f"{name} of a batch to diagnose is not a tensor of rows"):
                found[name] = torch.as_tensor(value).to(device)
    ids = found.get("input_ids")
    if ids is None:
        raise InPlaceTTTError("a batch to diagnose needs input_ids [B, T].")
    if ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise InPlaceTTTError(
            f"input_ids must be whole numbers [B, T] with at least one token, got {ids.dtype} "
            f"{list(ids.shape)}."
        )
    for name, tensor in found.items():
        if tensor.shape != ids.shape and not (name == "position_ids" and tensor.shape == (1, ids.shape[1])):
            raise InPlaceTTTError(
                f"{name} must have the shape {list(ids.shape)} of input_ids, got {list(tensor.shape)}."
            )
    return found


def _own_next_tokens(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """Returns the labels of plain text: the ids without padding and without first tokens.

    No token of the same document precedes a document's first token, so it is not predicted.
    """
    labels = ids.clone()
    if mask is not None:
        labels[mask == 0] = IGNORED
        labels[:, 1:][mask[:, :-1] == 0] = IGNORED
    elif positions is not None:
        labels[:, 1:][document_starts(positions.expand(len(ids), -1))[:, 1:]] = IGNORED
    return labels
