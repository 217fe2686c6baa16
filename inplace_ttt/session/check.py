"""Whether what a session's file holds can be a session of a model: names, shapes, dtypes, counts, and numbers
that are finite."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError, shown
from ..families import CACHE, features
from ..layer.forward_context import reading_text
from ..surgery import config_of, fast_weights
from .file import Header

_MOST = 2**40
"""Tokens of a session, to keep sums of counts within 64 bits."""


def check_header(
    path: str | os.PathLike[str], header: Header, config: InPlaceTTTConfig, fingerprint: str
) -> None:
    """Refuse, with an InPlaceTTTError, the session of another model or of another TTT config."""
    if header.config != config.to_dict():
        raise InPlaceTTTError(
            f"{path} was written under another TTT config than this model's; load it into the model that "
            "wrote it."
        )
    if header.fingerprint != fingerprint:
        measured = config.whitening is not None or config.normalize_targets
        raise InPlaceTTTError(
            f"{path} belongs to a model with other "
            f"weights{', or was saved before what is measured on a text counted' if measured else ''} "
            f"(fingerprint {header.fingerprint[:12]}…); load it into the model that wrote it, or read its "
            "text again."
        )


def check_session(
    path: str | os.PathLike[str], header: Header, tensors: Mapping[str, Tensor], model: PreTrainedModel
) -> None:
    """Refuse, with an InPlaceTTTError, what a session of this model cannot be. Reads one token with the model
    to know its cache."""
    _Session(path, header, tensors, model).run()


def check_streams(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    config: InPlaceTTTConfig,
    sizes: Mapping[int, tuple[int, int]],
) -> int:
    """Refuse, with an InPlaceTTTError, fast weights that none of a model's can be; sizes: h and d of each TTT
    layer. Gives their rows."""
    check = _Streams(path, tensors, config, sizes)
    check.run()
    return check.rows


@dataclass(frozen=True)
class _Layer:
    """A decoder layer's cache, as the model makes it. keys, values: heads and width."""

    keys: tuple[int, int]
    values: tuple[int, int]
    window: int | None


@torch.no_grad()
def _layers_of(model: PreTrainedModel) -> dict[int, _Layer]:
    """The layers with a KV cache, from a forward of one token."""
    cache = DynamicCache(config=model.config.get_text_config())
    with reading_text():
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), **{CACHE: cache}, logits_to_keep=1)
    return {
        index: _Layer(
            layer.keys.shape[1::2], layer.values.shape[1::2], getattr(layer, "sliding_window", None)
        )
        for index, layer in enumerate(cache.layers)
        if getattr(layer, "is_initialized", False)
    }


class _Streams:
    """The fast weights' part."""

    others: frozenset[str] = frozenset()
    """Names of what a session holds beside its fast weights; `_check_others` looks at these."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, Tensor],
        config: InPlaceTTTConfig,
        sizes: Mapping[int, tuple[int, int]],
    ) -> None:
        self.path, self.tensors, self.config = path, tensors, config
        self.sizes = {index: (d, *config.state_shape(d, h)) for index, (h, d) in sizes.items()}
        self.kept = {name.partition(".")[0] for name in tensors if ".fast." in name}
        self.rows = self._rows()

    def run(self) -> None:
        self._names()
        self._check_others()
        for index, size in self.sizes.items():
            if self.kept:
                self._stream(index, *size)
        for name, tensor in self.tensors.items():
            self._require(
                not tensor.is_floating_point() or bool(tensor.isfinite().all()),
                f"{name} holds numbers that are not finite",
            )

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise InPlaceTTTError(
                f"{self.path} is no session of this model: {what}; take another copy of it, or read the "
                "text again."
            )

    def _shape(self, name: str, shape: list[int | None], *dtypes: torch.dtype) -> Tensor:
        """The tensor of that name: there, of that shape (None: any), and of one of these dtypes (none:
        floating)."""
        self._require(name in self.tensors, f"{name} is missing")
        tensor = self.tensors[name]
        fits = tensor.ndim == len(shape) and all(
            wanted in (None, found) for wanted, found in zip(shape, tensor.shape, strict=True)
        )
        wanted = [size if size is not None else "any" for size in shape]
        self._require(fits, f"{name} is {list(tensor.shape)} instead of {wanted}")
        right = tensor.dtype in dtypes if dtypes else tensor.is_floating_point() and tensor.itemsize >= 2
        self._require(
            right,
            f"{name} is {tensor.dtype} instead of {' or '.join(map(str, dtypes)) or 'a floating dtype'}",
        )
        return tensor

    def _rows(self) -> int:
        """Sequences in the session, by the first tensor that says so; the others must agree."""
        for name, tensor in sorted(self.tensors.items()):
            if tensor.ndim:
                return tensor.shape[1 if name.endswith(".counts") and tensor.ndim > 1 else 0]
        return 0

    def _check_others(self) -> None:
        """Nothing here."""

    def _names(self) -> None:
        kinds = ("counts", "state", "z", "x") if self.config.prompt_write is None else ("counts", "state")
        streams = {f"{index}.fast.{kind}" for index in self.sizes for kind in kinds}
        others = sorted(set(self.tensors) - streams - self.others)
        self._require(
            not others, f"it holds {shown(others[0]) if others else ''}, which no session of this model has"
        )
        self._require(self.rows > 0 or not self.tensors, "it has no sequence")
        missing = sorted({str(index) for index in self.sizes} - self.kept) if self.kept else []
        self._require(not missing, f"the fast weight of layer {''.join(missing[:1])} is missing")

    def _stream(self, index: int, d: int, rows: int, width: int) -> None:
        name, chunk = f"{index}.fast", self.config.chunk_size
        filled, written, unbroken = self._shape(f"{name}.counts", [3, self.rows], torch.int64).tolist()
        right = all(
            0 <= f < chunk and 0 <= w < _MOST and 0 <= u < _MOST
            for f, w, u in zip(filled, written, unbroken, strict=True)
        )
        self._require(right, f"{name}.counts are out of range for chunks of {chunk}")
        if any(written) or self.config.prompt_write is not None or f"{name}.state" in self.tensors:
            self._shape(f"{name}.state", [self.rows, rows, width], torch.float32, torch.float64)
        if any(filled) or {f"{name}.z", f"{name}.x"} & set(self.tensors):
            # then tokens and positions are held, not keys and sources
            by_gradient = self.config.target == "gradient"
            of_z, of_x, dtypes = (1, 1, (torch.int64,)) if by_gradient else (width, d, ())
            open_rows = self._shape(f"{name}.z", [self.rows, None, of_z], *dtypes).shape[1]
            self._shape(f"{name}.x", [self.rows, open_rows, of_x], *dtypes)
            self._require(
                max(filled) <= open_rows <= chunk,
                f"{name}.z has {open_rows} tokens of an open chunk of {max(filled)}",
            )


class _Session(_Streams):
    """All of it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        tensors: Mapping[str, Tensor],
        model: PreTrainedModel,
    ) -> None:
        super().__init__(
            path,
            tensors,
            config_of(model),
            {index: features(layer) for index, layer in fast_weights(model).items()},
        )
        self.header, self.model = header, model
        self.others = frozenset(
            {"tokens", *(f"{index}.{kind}" for index in header.attention for kind in ("keys", "values"))}
        )

    def _check_others(self) -> None:
        self._tokens()
        self._attention()

    def _stream(self, index: int, d: int, rows: int, width: int) -> None:
        super()._stream(index, d, rows, width)
        if "tokens" in self.tensors:
            filled, written, _ = self.tensors[f"{index}.fast.counts"].tolist()
            taken = max(w * self.config.chunk_size + f for w, f in zip(written, filled, strict=True))
            held = self.tensors["tokens"].shape[1]
            self._require(taken <= held, f"{index}.fast has taken in {taken} tokens, more than it holds")

    def _asked_again(self) -> int:
        """Tokens of open chunks, whose KV cache is kept for the gradient of the chunk's loss."""
        counts = [
            self.tensors[f"{index}.fast.counts"] for index in self.sizes if self.config.target == "gradient"
        ]
        return max((int(count[0].max()) for count in counts), default=0)

    def _tokens(self) -> None:
        if "tokens" in self.tensors:
            tokens = self._shape("tokens", [self.rows, None], torch.int64)
            known = self.model.get_input_embeddings().num_embeddings
            self._require(
                not tokens.numel() or bool(((tokens >= 0) & (tokens < known)).all()),
                f"it has token ids that are not below {known}",
            )

    def _attention(self) -> None:
        kept = self.header.attention
        if not kept:
            return
        layers = _layers_of(self.model)
        self._require(set(kept) == set(map(str, layers)), f"its KV cache is of layers {shown(sorted(kept))}")
        lengths = {layer.length for layer in kept.values()}
        length = lengths.pop()
        self._require(not lengths and 0 < length < _MOST, "its layers have seen different numbers of tokens")
        if "tokens" in self.tensors:
            self._require(
                length <= self.tensors["tokens"].shape[1],
                f"its KV cache has seen {length} tokens, more than it holds",
            )
        for index, layer in layers.items():
            window = kept[str(index)].window
            self._require(
                window in (None, layer.window),
                f"layer {index} has a window of {window} instead of {layer.window}",
            )
            held = length if window is None else min(length, max(window - 1, 1) + self._asked_again())
            for kind, (heads, width) in (("keys", layer.keys), ("values", layer.values)):
                self._shape(f"{index}.{kind}", [self.rows, heads, held, width])
