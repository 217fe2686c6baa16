"""Records the readings of a running model, as inputs and outputs of its TTT layers, or as its logits.

The audit has its own hooks on the down-projection, its MLP and the first decoder layer. So a fault in the
package's hooks does not affect the recording.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..config import InPlaceTTTConfig
from ..families import locate
from ..layer.fast_linear import FastWeight
from ..surgery import fast_weights
from .declared_rule import DeclaredRule


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a document.

    Attributes:
        forward: number of the forward that read the tokens.
        row: row of the batch.
        start: first token in the row.
        stop: position after the last token.
        writes: True if the tokens fill chunks.
    """

    forward: int
    row: int
    start: int
    stop: int
    writes: bool = True


@dataclass
class Seen:
    """Tensors of one layer in one forward.

    Attributes:
        z: input of the down-projection.
        source: source of the targets, detached.
        out: output of the down-projection, detached.
        rows: shape [B, T] of the batch.
        passed: the output with its graph. Later modules may change it in place.
        path: the source with its graph, as a view that only the targets use.
    """

    z: Tensor
    source: Tensor
    out: Tensor
    rows: torch.Size
    passed: Tensor
    path: Tensor

    def part(self, name: str, piece: Piece) -> Tensor:
        """Returns the tensor of that name over the tokens of a piece, [n, ·] in float64 on the CPU."""
        tensor: Tensor = getattr(self, name)
        return tensor.reshape(*self.rows, -1)[piece.row, piece.start : piece.stop].double().cpu()


Document = Sequence[Piece]
Documents = Sequence[Document]


@dataclass
class Record:
    """The forwards of a model.

    Attributes:
        config: the settings under which the model ran.
        dtype: dtype of the computation if autocast changed it, or None.
        shapes: rows and tokens of each forward.
    """

    config: InPlaceTTTConfig
    dtype: torch.dtype | None = None
    shapes: list[tuple[int, int]] = field(default_factory=list)

    def whole(self) -> list[Document]:
        """Returns each row of the first forward as one document."""
        rows, tokens = self.shapes[0]
        return [[Piece(0, row, 0, tokens)] for row in range(rows)]

    def as_one_text(self, rows: int, skipped: Sequence[int] = (), unwritten: Sequence[int] = ()) -> Documents:
        """Returns each row of all forwards as one document.

        Args:
            rows: number of rows.
            skipped: numbers of forwards that are left out.
            unwritten: numbers of forwards whose tokens read but do not write.
        """
        numbers = [n for n in range(len(self.shapes)) if n not in skipped]
        return [
            [Piece(n, row, 0, self.shapes[n][1], n not in unwritten) for n in numbers] for row in range(rows)
        ]


@dataclass
class Recording(Record):
    """Tensors of the TTT layers in each forward.

    Attributes:
        layers: the model's TTT layers by number.
        rules: declared rules at the time of the run, for layers whose settings or tensors may have changed
            since.
        forwards: one entry per forward, by layer.
    """

    layers: dict[int, FastWeight] = field(default_factory=dict)
    rules: dict[int, DeclaredRule] = field(default_factory=dict)
    forwards: list[dict[int, Seen]] = field(default_factory=list)

    def of(self, index: int, document: Document) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the tensors of a layer over a document.

        Returns:
            z [T, h], source [T, d] and output [T, d] in float64, and bool [T], True for tokens that fill
            chunks.
        """
        writes = torch.cat([torch.full((piece.stop - piece.start,), piece.writes) for piece in document])
        z, source, out = (
            torch.cat([self.forwards[piece.forward][index].part(name, piece).detach() for piece in document])
            for name in ("z", "source", "out")
        )
        return z, source, out, writes


@contextmanager
def recording(lm: Any, config: InPlaceTTTConfig) -> Iterator[Recording]:
    """Yields a recording with one entry per forward of the model inside the context.

    Tensors that have a graph keep it.
    """
    decoder, found = locate(lm), Recording(config, layers=fast_weights(lm))
    held: dict[str, Tensor] = {}

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows, tokens = held["embeddings"].shape[:2]
        found.shapes.append((rows, tokens))
        found.forwards.append({})

    def note(index: int, down: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        source = held["embeddings" if config.target == "embeddings" else f"mlp {index}"]
        rows = held["embeddings"].shape[:2]
        found.forwards[-1][index] = Seen(
            args[0], source.detach().clone(), out.detach().clone(), rows, out, source
        )

    handles = _fork_of_input(decoder.blocks[0], held, "embeddings")
    handles.append(decoder.blocks[0].register_forward_pre_hook(start, with_kwargs=True))
    for index, layer in found.layers.items():
        handles += _fork_of_input(decoder.layers[index].mlp, held, f"mlp {index}")
        handles.append(layer.register_forward_pre_hook(_for_the_layer_alone))
        handles.append(layer.register_forward_hook(functools.partial(note, index)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _fork_of_input(module: nn.Module, held: dict[str, Tensor], name: str) -> list[Any]:
    """Returns hooks that pass a view of the input to the module's other hooks.

    The module itself receives the input, and only hooks receive the view. The targets take their source by
    hooks, so the view's gradient comes through the targets alone. The view is kept in `held`.
    """
    own: list[Tensor] = []

    def change(
        args: tuple[Any, ...], kwargs: dict[str, Any], new: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

    def first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own[:] = [args[0] if args else kwargs["hidden_states"]]
        held[name] = own[0].view_as(own[0])
        return change(args, kwargs, held[name])

    def last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return change(args, kwargs, own.pop())

    return [
        module.register_forward_pre_hook(first, with_kwargs=True, prepend=True),
        module.register_forward_pre_hook(last, with_kwargs=True),
    ]


def _for_the_layer_alone(down: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Returns a view of the input for this layer alone.

    The view's gradient leaves out other users of the input, such as LoRA around the layer.
    """
    return (args[0].view_as(args[0]),)


@dataclass
class LogitsRecord(Record):
    """Token ids and logits of each forward.

    Attributes:
        lm: the model that ran.
        forwards: token ids [B, T] and the logits [B, n, V] of the last n tokens.
    """

    lm: Any = None
    forwards: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def of(self, document: Document) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token ids [T] of a document, bool [T] for tokens with logits, and these logits [n, V]."""
        ids, known, found = [], [], []
        for piece in document:
            tokens, logits = self.forwards[piece.forward]
            first = tokens.shape[1] - logits.shape[1]
            ids.append(tokens[piece.row, piece.start : piece.stop])
            known.append(torch.arange(piece.start, piece.stop) >= first)
            found.append(logits[piece.row, max(0, piece.start - first) : max(0, piece.stop - first)])
        return torch.cat(ids), torch.cat(known), torch.cat(found)


@contextmanager
def recording_logits(lm: Any, config: InPlaceTTTConfig) -> Iterator[LogitsRecord]:
    """Yields a recording with one entry per forward of the model inside the context.

    Forwards inside a forward, which compute the loss of a chunk, are left out.
    """
    found, under_way = LogitsRecord(config, lm=lm), []

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        under_way.append(module)

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        under_way.pop()
        if under_way:
            return
        ids: Tensor = args[0] if args else kwargs["input_ids"]
        found.shapes.append((ids.shape[0], ids.shape[1]))
        found.forwards.append((ids, out.logits.detach().clone()))

    handles = [lm.register_forward_pre_hook(begin), lm.register_forward_hook(note, with_kwargs=True)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
