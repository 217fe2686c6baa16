"""The token ids of a session, and the checks that its cache has read them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..errors import InPlaceTTTError
from ..layer.cache import streams


def appended(ids: Tensor, model: PreTrainedModel, cache: Cache, tokens: Tensor | None) -> Tensor:
    """Returns the session's tokens followed by `ids`, [B, n].

    Args:
        ids: token ids [B, n], integers.
        model: the session's model.
        cache: the session's cache.
        tokens: the session's token ids [B, n]; None before the first token.

    Raises:
        InPlaceTTTError: if `ids` are not token ids of this model, or do not fit the session.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        what = (
            f"{ids.dtype} of shape {list(ids.shape)}"
            if isinstance(ids, Tensor)
            else f"a {type(ids).__name__}"
        )
        raise InPlaceTTTError(f"token ids must be a tensor of whole numbers [B, n], got {what}.")
    known = model.get_input_embeddings().num_embeddings
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise InPlaceTTTError(
            f"the model's token ids are 0 to {known - 1}, got {int(ids.min())} to {int(ids.max())}."
        )
    refuse_unknown(cache, tokens)
    held = {stream.batch for stream in streams(cache).values() if not stream.is_empty} | (
        {len(tokens)} if tokens is not None else set()
    )
    if held and held != {len(ids)}:
        raise InPlaceTTTError(
            f"the session holds {max(held)} sequences, but the new tokens have {len(ids)} rows; give one "
            "row per sequence."
        )
    if tokens is None:
        return ids.long()
    return torch.cat([tokens, ids.long().to(tokens.device)], dim=1)


def refuse_unknown(cache: Cache, tokens: Tensor | None) -> None:
    """Raises InPlaceTTTError if later tokens would be read at wrong positions."""
    for stream in streams(cache).values():
        stream.check_holds_state()
    known, read = 0 if tokens is None else tokens.shape[1], cache.get_seq_length()
    if read > known:
        raise InPlaceTTTError(
            f"the session's cache has read {read} tokens, but `tokens` holds {known}, because the cache "
            "was passed to the model by hand or a call was interrupted; append the missing token ids to "
            "`tokens`, or continue from an earlier fork or file."
        )
