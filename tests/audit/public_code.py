"""Adapters of the public implementations, which are the authors' MLPs and the gating of the Moshi port.

    audit_module(PublicMLP(model.model.layers[0].mlp))            # hf_models/ of ByteDance-Seed/In-Place-TTT
    audit_module(PublicInferenceLayer(model.model.layers[0]))     # inference_model/ of the same repository
    audit_module(MoshiGating(layer.gating))                       # moshi_in_place

Each adapter drives a copy of the module, with the unmodified class and short chunks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from inplace_ttt.audit import AuditedModule, NotChecked, ReferenceMLP
from inplace_ttt.audit.borrowing import probe_chunk
from inplace_ttt.audit.copied import CopiedModule
from inplace_ttt.audit.stream import Stream


class PublicMLP(ReferenceMLP):
    """The MLP of the authors' training code, or the MLP of their inference code if it reads in one call.

    Args:
        mlp: a module with the parts that `ReferenceMLP` needs, `ttt_chunk` and `ttt_lr`. Its `ttt_proj` may
            be None. It may return (output, weight).
        name: for the report; the class name by default.
        dtype: dtype of the copy.
    """

    def __init__(self, mlp: Any, *, name: str | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(
            mlp, probe_chunk(mlp.ttt_conv.kernel_size[0]), float(mlp.ttt_lr), name=name, dtype=dtype
        )
        self.module.ttt_chunk = self.chunk_size  # type: ignore[assignment]

    def forward(
        self,
        x: Tensor,
        target: Tensor,
        *,
        documents: Sequence[int] | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        out: Any = super().forward(x, target, documents=documents, padding=padding)
        return out[0] if isinstance(out, tuple) else out

    @property
    def own_chunk(self) -> int:
        return int(self._given.ttt_chunk)  # type: ignore[arg-type]

    def _in(self, dtype: torch.dtype) -> AuditedModule:
        return PublicMLP(self._given, name=self.name, dtype=dtype)


class PublicInferenceLayer(PublicMLP):
    """A decoder layer of the authors' inference code, which keeps its MLP's state in a cache.

    It also reads in pieces. On the copy, attention adds nothing and the norms are identities. So the layer
    adds exactly the MLP's output to its input.

    Args:
        layer: a decoder layer with `self_attn`, `input_layernorm`, `post_attention_layernorm` and `mlp`.
        name: for the report; the class name by default.
        dtype: dtype of the copy.
    """

    def __init__(self, layer: Any, *, name: str | None = None, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(layer.mlp, name=name or type(layer).__name__, dtype=dtype)
        self._layer = layer

    def stream(self) -> Stream:
        layer = copy.deepcopy(self._layer)
        layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm = (
            _NoAttention(),
            nn.Identity(),
            nn.Identity(),
        )
        layer.mlp, layer.ttt_chunk = self.module, self.chunk_size
        return _PublicStream(layer.eval(), self._dtype)

    def _in(self, dtype: torch.dtype) -> AuditedModule:
        return PublicInferenceLayer(self._layer, name=self.name, dtype=dtype)


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _PublicStream:
    """One sequence through a decoder layer, with the parts of the authors' cache that the layer uses."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        self._layer, self._dtype = layer, dtype
        self.reset()

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        x = x.to(self._dtype)
        with torch.no_grad():
            return self._layer(x, past_key_values=self._cache, target_states=target.to(self._dtype)) - x

    @property
    def state(self) -> Tensor | None:
        """The running weight [d, h]."""
        return self._cache.ttt_states[self._layer.layer_idx][2]

    def reset(self) -> None:
        states = {self._layer.layer_idx: (None, None, None)}
        self._cache = SimpleNamespace(
            ttt_states=states, TTT_update=lambda state, index: states.__setitem__(index, state)
        )


class MoshiGating(CopiedModule):
    """A gating module of the Moshi port, called as `gating(x, token_embeddings)`.

    The module runs in parallel in training mode, and streams in evaluation mode. The copy computes in
    float32.

    Args:
        gating: a module with these parts: `linear_in` (gate and value stacked), `activation`, `linear_out`
            (the model's own down-projection), `w_down` (its copy, which is written),
            `target_generator.conv1d.conv`, `target_generator.W_target`, `chunk_size`, `ttt_lr`,
            `delta_clip_fro_norm`, `reset_ttt_state`.
        name: for the report; the class name by default.
    """

    def __init__(self, gating: nn.Module, *, name: str | None = None) -> None:
        super().__init__(gating, name, torch.float32)
        self.chunk_size, self.eta = probe_chunk(self._kernel), self._part("ttt_lr")
        self.module.chunk_size = self.chunk_size  # type: ignore[assignment]
        self.input_size, (self.d, self.h) = (
            self._part("linear_in").in_features,
            self._part("linear_out").weight.shape,
        )

    @property
    def _kernel(self) -> int:
        return int(self._part("target_generator").conv1d.conv.kernel_size[0])

    @property
    def own_chunk(self) -> int:
        return int(self._given.chunk_size)  # type: ignore[arg-type]

    def forward(
        self,
        x: Tensor,
        target: Tensor,
        *,
        documents: Sequence[int] | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        if documents is not None or padding is not None:
            raise NotChecked("the module takes neither document boundaries nor a padding mask")
        was_training = self.module.training
        self.module.train()  # the parallel form runs in training mode alone
        try:
            return self.module(x.to(self._dtype), target.to(self._dtype))
        finally:
            self.module.train(was_training)

    def keys(self, x: Tensor) -> Tensor:
        both = self._part("linear_in")(x.to(self._dtype)).unflatten(-1, (2, -1))
        return self._part("activation")(both[..., 0, :]) * both[..., 1, :]

    @property
    def fast_weight(self) -> Tensor:
        return self._part("linear_out").weight

    @property
    def conv(self) -> Tensor:
        return self._part("target_generator").conv1d.conv.weight

    @property
    def proj(self) -> Tensor:
        return self._part("target_generator").W_target.weight

    def is_fast(self, name: str) -> bool:
        return name in ("linear_out.weight", "w_down") or name in dict(self.module.named_buffers())

    def stream(self) -> Stream:
        return _MoshiStream(copy.deepcopy(self.module).eval(), self._dtype)

    def _in(self, dtype: torch.dtype) -> AuditedModule:
        return MoshiGating(self._given, name=self.name)

    @property
    def tau(self) -> float | None:
        return self._part("delta_clip_fro_norm")

    @contextmanager
    def unclipped(self) -> Iterator[None]:
        clip = self.tau
        self.module.delta_clip_fro_norm = None  # type: ignore[assignment]
        try:
            yield
        finally:
            self.module.delta_clip_fro_norm = clip  # type: ignore[assignment]

    @contextmanager
    def bare(self) -> Iterator[None]:
        weights = [self._part(name) for name in ("w_down", "w_down_pretrained")]
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.data.zero_()
        try:
            yield
        finally:
            for weight, values in zip(weights, before, strict=True):
                weight.data.copy_(values)


class _MoshiStream:
    """One conversation on a copy of the module. The copy itself keeps the state."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        return self._module(x.to(self._dtype), target.to(self._dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the copy, which hold the conversation."""
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def reset(self) -> None:
        self._module.reset_ttt_state()  # type: ignore[operator]
