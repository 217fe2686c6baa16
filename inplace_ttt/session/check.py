"""Checks that the contents of a session file fit a model.

It checks names, shapes, dtypes and counts, and that all values are finite.
"""

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
"""Largest allowed token count of a session. Sums of such counts fit into 64 bits."""


def check_header(
    path: str | os.PathLike[str], header: Header, config: InPlaceTTTConfig, fingerprint: str
) -> None:
    """Raises InPlaceTTTError for a session of another model or of another TTT config.

    Args:
        path: the session file, for the message.
        header: header of the file.
        config: TTT config of the model.
        fingerprint: fingerprint of the model.
    """
    if header.config != config.to_dict():
        raise InPlaceTTTError(
            f"{path} was written under another TTT config than this model's; load it into the model that "
            "wrote it."
        )
    if header.fingerprint != fingerprint:
        measured = config.whitening is not None or config.normalize_targets
        raise InPlaceTTTError(
            f"{path} belongs to a model with other "
            f"weights{', or was saved before fingerprints covered the calibration' if measured else ''} "
            f"(fingerprint {header.fingerprint[:12]}…); load it into the model that wrote it, or read its "
            "text again."
        )


def check_session(
    path: str | os.PathLike[str], header: Header, tensors: Mapping[str, Tensor], model: PreTrainedModel
) -> None:
    """Raises InPlaceTTTError for tensors that cannot be a session of this model.

    The model reads one token, since the check needs the shapes of its cache.

    Args:
        path: the session file, for the message.
        header: header of the file.
        tensors: tensors of the file.
        model: converted model.
    """
    _Session(path, header, tensors, model).run()


def check_streams(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    config: InPlaceTTTConfig,
    sizes: Mapping[int, tuple[int, int]],
) -> int:
    """Raises InPlaceTTTError for tensors that cannot be a model's fast weights.

    Args:
        path: the session file, for the message.
        tensors: tensors of the file.
        config: TTT config of the model.
        sizes: TTT layer -> (h, d).

    Returns:
        The number of sequences in the session.
    """
    check = _Streams(path, tensors, config, sizes)
    check.run()
    return check.rows


@dataclass(frozen=True)
class _Layer:
    """The sizes of a decoder layer's KV cache, as the model makes it.

    Attributes:
        keys: number of heads, and numbers per head.
        values: number of heads, and numbers per head.
        window: number of tokens that the cache keeps; None for all.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    window: int | None


@torch.no_grad()
def _layers_of(model: PreTrainedModel) -> dict[int, _Layer]:
    """Returns the layers with a KV cache, found by a forward pass over one token."""
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
    """Checks the fast weights of a session."""

    others: frozenset[str] = frozenset()
    """Names of a session's other tensors, which `_check_others` checks."""

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
                f"{self.path} is not a session of this model: {what}; use another copy of the file, or read "
                "the text again."
            )

    def _shape(self, name: str, shape: list[int | None], *dtypes: torch.dtype) -> Tensor:
        """Returns the tensor of that name, which must exist with that shape (None: any) and dtype.

        Without `dtypes`, any floating dtype of at least 16 bits passes.
        """
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
        """Returns the number of sequences, from the first tensor with a batch axis.

        Later checks compare the other tensors with it.
        """
        for name, tensor in sorted(self.tensors.items()):
            if tensor.ndim:
                return tensor.shape[1 if name.endswith(".counts") and tensor.ndim > 1 else 0]
        return 0

    def _check_others(self) -> None:
        """Checks nothing; `_Session` overrides it."""

    def _names(self) -> None:
        kinds = ("counts", "state", "z", "x") if self.config.prompt_write is None else ("counts", "state")
        streams = {f"{index}.fast.{kind}" for index in self.sizes for kind in kinds}
        others = sorted(set(self.tensors) - streams - self.others)
        self._require(
            not others,
            f"it has a tensor {shown(others[0]) if others else ''}, which no session of this model has",
        )
        self._require(self.rows > 0 or not self.tensors, "it holds 0 sequences")
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
            # with target="gradient", z and x hold token ids and positions, not keys and target sources
            by_gradient = self.config.target == "gradient"
            of_z, of_x, dtypes = (1, 1, (torch.int64,)) if by_gradient else (width, d, ())
            open_rows = self._shape(f"{name}.z", [self.rows, None, of_z], *dtypes).shape[1]
            self._shape(f"{name}.x", [self.rows, open_rows, of_x], *dtypes)
            self._require(
                max(filled) <= open_rows <= chunk,
                f"{name}.z has {open_rows} tokens of an open chunk of {max(filled)}",
            )


class _Session(_Streams):
    """Checks all of a session."""

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

    def _asked_again(self) -> int:
        """Returns the number of tokens in the longest unfinished chunk, with target="gradient".

        A layer with a window keeps this many more tokens in its KV cache, for the gradient of the chunk's
        loss.
        """
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
        self._require(
            set(kept) == set(map(str, layers)), f"its KV cache belongs to layers {shown(sorted(kept))}"
        )
        lengths = {layer.length for layer in kept.values()}
        length = lengths.pop()
        self._require(not lengths and 0 < length < _MOST, "its layers have read different numbers of tokens")
        if "tokens" in self.tensors:
            self._require(
                length <= self.tensors["tokens"].shape[1],
                f"its KV cache has read {length} tokens, but the session holds fewer",
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
