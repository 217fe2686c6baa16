"""The workers' methods for memories. The server calls them by name, through `collective_rpc`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any

from ..errors import InPlaceTTTError
from .batch import NAME, Batch
from .snapshots import Snapshot, SnapshotFiles
from .vllm_names import VllmConfig

Answer = dict[str, Any]
"""A snapshot's `tokens`, `chunks` and `bytes`, or the message of an `error`."""


def _answers(call: Callable[..., Answer]) -> Callable[..., Answer]:
    """Makes a method return its InPlaceTTTError, since vLLM drops the message of an exception in a worker."""

    @wraps(call)
    def answered(*args: Any) -> Answer:
        try:
            return call(*args)
        except InPlaceTTTError as error:
            return {"error": str(error)}

    return answered


class MemoryWorker:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`)."""

    vllm_config: VllmConfig

    @property
    def ttt_batch(self) -> Batch:
        batch = self.vllm_config.compilation_config.static_forward_context[NAME]
        assert isinstance(batch, Batch)
        return batch

    @cached_property
    def ttt_files(self) -> SnapshotFiles:
        layers = self.ttt_batch.fast_weights
        sizes = {index: (layer.input_size, layer.output_size) for index, layer in layers.items()}
        first = next(iter(layers.values()))
        return SnapshotFiles(self.vllm_config.model_config.model, first.fast.config, sizes, first.is_split)

    @_answers
    def ttt_keep(self, snapshot: str, name: str, read: int) -> Answer:
        """Makes a snapshot of the request whose `keep` is `name`, after its last token.

        Args:
            snapshot: the id of the new snapshot.
            name: the request's `keep`.
            read: the number of tokens that its state has read, including those of its first snapshot.
        """
        kept = self.ttt_batch.keep(name, read)
        if kept is None:
            raise InPlaceTTTError("the worker did not keep a state of this request.")
        return self._hold(snapshot, kept)

    def ttt_forget(self, name: str) -> None:
        """Drops the snapshot of the request whose `keep` is `name`, or prevents it."""
        self.ttt_batch.forget(name)

    @_answers
    def ttt_load(self, snapshot: str, path: str) -> Answer:
        """Makes a snapshot from a file."""
        return self._hold(snapshot, self.ttt_files.read(path))

    @_answers
    def ttt_save(self, snapshot: str, path: str) -> Answer:
        """Writes a snapshot to a file in one step."""
        held = self.ttt_batch.snapshots[snapshot]
        self.ttt_files.write(held, path)
        return self._about(held)

    def ttt_drop(self, snapshot: str) -> None:
        """Drops a snapshot. No request may start from it afterwards."""
        self.ttt_batch.snapshots.pop(snapshot, None)

    def _hold(self, name: str, snapshot: Snapshot) -> Answer:
        self.ttt_batch.snapshots[name] = snapshot
        return self._about(snapshot)

    def _about(self, snapshot: Snapshot) -> Answer:
        chunks = snapshot.tokens // self.ttt_files.config.chunk_size
        return {"tokens": snapshot.tokens, "chunks": chunks, "bytes": snapshot.nbytes}
