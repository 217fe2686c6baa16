"""lm-evaluation-harness with a session: a text is read once, and many requests are asked about it.

    python -m inplace_ttt.clients.lm_eval --model inplace-ttt \\
        --model_args pretrained=./smollm2-ttt,session=book.session --tasks mine --include_path tasks/

The command is lm-eval's own, with one more model. From Python, importing this module adds the model.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import AutoTokenizer, Cache

from ..checkpoint.opened import open_model
from ..errors import InPlaceTTTError
from ..families import CACHE
from ..session.session import Session


@register_model("inplace-ttt")
class SessionLM(HFLM):
    """A converted model for lm-evaluation-harness, with the fast weights of a session.

    Each request starts from a copy of the session without its KV cache. So a request does not see another
    one's text, and positions start at 0. A model with `target: gradient` writes only in the session.

    Args:
        pretrained: converted checkpoint or adapter folder.
        session: session file; None to begin each request without a past.
        base: present place of an adapter's base, if it was moved.
        dtype: of the weights (default: the checkpoint's).
        kwargs: arguments for lm-eval's `HFLM`.

    Raises:
        InPlaceTTTError: if the model is not converted, or the session is not of this model.

    Examples:
        Two lines of Python, with a session that `Session.save` wrote:

            lm = SessionLM("./smollm2-ttt", session="book.session")
            lm_eval.simple_evaluate(lm, tasks=["mine"])
    """

    def __init__(
        self,
        pretrained: str,
        session: str | None = None,
        base: str | None = None,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        found = open_model(pretrained, base)
        model = found.load(dtype=dtype)
        self._session: Session | None = None
        if session is not None:
            self._session = Session.load(session, model).drop_kv_cache()
            if self._session.batch > 1:
                raise InPlaceTTTError(
                    f"{session} holds {self._session.batch} sequences; give a session of one."
                )
        tokenizer = AutoTokenizer.from_pretrained(found.tokenizer_source)
        device = kwargs.pop("device", None) or "cpu"
        super().__init__(pretrained=model.to(device), tokenizer=tokenizer, device=device, **kwargs)

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        """Returns the logits [B, T, vocabulary] of rows [B, T], padded at the right."""
        if self._session is None:
            return super()._model_call(inps, attn_mask, labels)
        with torch.no_grad():
            return self.model(inps, **{CACHE: self._cache(len(inps))}, use_cache=True).logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        if self._session is not None:
            kwargs[CACHE] = self._cache(len(context))
        return super()._model_generate(context, max_length, stop, **kwargs)

    def _cache(self, rows: int) -> Cache:
        """Returns a copy of the session's cache, repeated for each row."""
        assert self._session is not None
        cache = self._session.fork().cache
        cache.batch_repeat_interleave(rows)
        return cache


if __name__ == "__main__":
    try:
        cli_evaluate()
    except InPlaceTTTError as error:
        sys.exit(f"lm_eval: {error}")
