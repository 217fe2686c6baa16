"""Snapshots: copies of a slot's fast weights, in host memory or as a session's file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, distributed
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group

from ..checkpoint.folder_fingerprint import fingerprint_in
from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..session import file as session_file
from ..session.check import check_header, check_streams

_SPLIT = (".fast.state", ".fast.z")
"""Tensors whose last dimension is that of the keys."""


@dataclass(frozen=True)
class Snapshot:
    """The fast weights of one sequence, outside the slots.

    Attributes:
        layers: by layer index, the tensors of a stream with one row.
        tokens: the number of tokens that the sequence has read.
    """

    layers: Mapping[int, Mapping[str, Tensor]]
    tokens: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for held in self.layers.values() for tensor in held.values())

    def without_last(self) -> Snapshot:
        """Returns the fast weights before the last token, which must be in the open chunk."""
        return Snapshot({index: _without_last(held) for index, held in self.layers.items()}, self.tokens - 1)


@dataclass(frozen=True)
class Ended:
    """The fast weights of a request that ended.

    Attributes:
        whole: those after the last token that the worker read.
        before: those before this token, if it completed a chunk; else `whole` gives them.
    """

    whole: Snapshot
    before: Snapshot | None = None

    def after(self, tokens: int) -> Snapshot:
        """Returns the fast weights after this number of tokens: all that the worker read, or one less.

        Raises:
            InPlaceTTTError: if it is another number.
        """
        if tokens == self.whole.tokens:
            return self.whole
        if tokens == self.whole.tokens - 1:
            return self.before or self.whole.without_last()
        raise InPlaceTTTError(
            f"the worker read {self.whole.tokens} tokens, but the request and its answer have {tokens}."
        )


class SnapshotFiles:
    """Reads and writes snapshots as files of `Session`.

    Args:
        model: the folder of the model.
        config: the model's TTT config.
        sizes: input and output features (h, d) of each TTT layer's down-projection, by layer index.
        is_split: each rank of tensor parallelism holds a part of the keys' features. A file holds all of
            them, and the first rank writes it.
    """

    def __init__(
        self, model: str, config: InPlaceTTTConfig, sizes: Mapping[int, tuple[int, int]], is_split: bool
    ) -> None:
        self.model, self.config, self.sizes, self.is_split = model, config, sizes, is_split

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_in(self.model)

    def write(self, snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
        """Writes a snapshot to a file in one step, as `Session.save` does. All ranks must call it."""
        tensors = {
            f"{index}.fast.{name}": tensor
            for index, held in snapshot.layers.items()
            for name, tensor in held.items()
        }
        if self.is_split:
            tensors = {
                name: _joined(tensor) if name.endswith(_SPLIT) else tensor for name, tensor in tensors.items()
            }
        if get_tensor_model_parallel_rank() > 0:
            return
        session_file.write(
            path, tensors, config=self.config.to_dict(), fingerprint=self.fingerprint, attention={}
        )

    def read(self, path: str | os.PathLike[str]) -> Snapshot:
        """Reads a snapshot from a file. If keys are split, each rank keeps its own part.

        Raises:
            InPlaceTTTError: if the file is damaged, of another model, has a KV cache or token ids, or holds
                several sequences.
        """
        try:
            header, tensors = session_file.read(path)
        except InPlaceTTTError as error:  # the path is the server's own, and means nothing to the client
            raise InPlaceTTTError(str(error).replace(str(path), "the file")) from None
        check_header("the file", header, self.config, self.fingerprint)
        if header.attention or "tokens" in tensors:
            raise InPlaceTTTError(
                "the file holds a session's KV cache too; save state.drop_kv_cache() instead."
            )
        if check_streams("the file", tensors, self.config, self.sizes) != 1:
            raise InPlaceTTTError(
                "the file does not hold exactly one sequence, as a memory does; save a session of one row."
            )
        layers: dict[int, dict[str, Tensor]] = {index: {} for index in self.sizes}
        for name, tensor in tensors.items():
            index, _, kind = name.partition(".fast.")
            layers[int(index)][kind] = (
                _own_part(tensor) if self.is_split and name.endswith(_SPLIT) else tensor
            )
        filled, written, _ = (int(count) for count in next(iter(layers.values()))["counts"][:, 0])
        if any(held["counts"][:2, 0].tolist() != [filled, written] for held in layers.values()):
            raise InPlaceTTTError(
                "the file's layers have read different numbers of tokens; take another copy of it."
            )
        return Snapshot(layers, written * self.config.chunk_size + filled)


def _joined(part: Tensor) -> Tensor:
    """Returns all ranks' parts, joined along the last dimension, in host memory."""
    group = get_tp_group()
    parts = [torch.empty_like(part) for _ in range(group.world_size)]
    distributed.all_gather(parts, part.contiguous(), group=group.cpu_group)
    return torch.cat(parts, dim=-1)


def _own_part(whole: Tensor) -> Tensor:
    group = get_tp_group()
    return whole.chunk(group.world_size, dim=-1)[group.rank_in_group].contiguous()


def _without_last(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    filled, written, seen = held["counts"][:, 0].tolist()
    shorter = {**held, "counts": torch.tensor([[filled - 1], [written], [seen - 1]])}
    for name in "zx":
        if filled > 1:
            shorter[name] = held[name][:, :-1]
        else:
            del shorter[name]
    return shorter
