"""The exports of a session's writes: as changes of weights, a plain model or a LoRA adapter."""

from __future__ import annotations

import os

from transformers import Cache, PreTrainedModel

from ..checkpoint.to_adapter import unchanged_base
from ..files.folders import new_folder
from ..files.manifest import CHECKPOINT
from .lora import write_lora
from .plain_model import bake
from .rank import RANK
from .weight_change import WeightChange, low_rank, weight_changes


class WeightExports:
    """The methods of `Session` that export its writes.

    Attributes:
        model: a converted model.
        cache: the cache that holds the writes.
    """

    model: PreTrainedModel
    cache: Cache

    def weight_changes(self, row: int = 0) -> dict[int, WeightChange]:
        """Computes the change of each TTT layer's W0 by the chunks written so far (paper Eq. (1): W0 + ηS).

        Args:
            row: index of the sequence in the session.

        Returns:
            A `WeightChange` per layer index. Its `matrix()` is the change [d, h] of W0.

        Raises:
            InPlaceTTTError: if the session has written nothing, or lacks that row.

        Examples:
            >>> change = session.weight_changes()[0]
            >>> change.matrix().shape, change.is_linear
            (torch.Size([64, 128]), True)
        """
        return weight_changes(self.model, self.cache, row)

    def bake(self, row: int = 0) -> PreTrainedModel:
        """Makes a plain model whose down-projections hold the session's writes: W0 + ηS.

        The plain model works without `inplace_ttt` and writes nothing. It shares all other weights with the
        session's model. It does not include the tokens of an unfinished chunk.

        Args:
            row: index of the sequence in the session.

        Returns:
            The plain model, in the base's class.

        Raises:
            InPlaceTTTError: if the session has written nothing, reads are not linear in the layer's input, or
                a down-projection is quantized or wrapped.

        Examples:
            >>> plain = session.bake()
            >>> type(plain).__name__
            'LlamaForCausalLM'
            >>> plain.save_pretrained("plain")
        """
        return bake(self.model, self.weight_changes(row))

    def to_lora(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = RANK,
        row: int = 0,
        base: str | None = None,
        overwrite: bool = False,
    ) -> dict[int, float]:
        """Saves the session's writes as a LoRA adapter of its base, for PEFT, vLLM and others.

        Each layer's change of W0 is replaced by its best approximation of the given rank.

        Args:
            path: adapter folder to write.
            rank: rank of each layer's product B A, at most the model's width.
            row: index of the sequence in the session.
            base: folder or hub id of the base (default: the place that the model was loaded from).
            overwrite: replace an earlier output.

        Returns:
            For each layer index, the fraction of ‖ΔW‖ (Frobenius) that the approximation loses.

        Raises:
            InPlaceTTTError: in the cases of `bake`. Also if a weight of the model differs from the base's,
                the base is unknown, or `path` may not be replaced.

        Examples:
            >>> lost = session.to_lora("small-lora", rank=32, base="small-base")
            >>> max(lost.values()) < 0.01
            True
        """
        known = unchanged_base(self.model, base, "use bake")
        factors = {
            index: low_rank(change.matrix(), rank) for index, change in self.weight_changes(row).items()
        }
        with new_folder(path, CHECKPOINT, overwrite=overwrite, sources=[known["name_or_path"]]) as folder:
            write_lora(folder, self.model, factors, known)
        return {index: factor.lost for index, factor in factors.items()}
