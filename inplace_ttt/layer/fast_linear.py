"""The down-projection as a fast weight.

`FastWeight` is mixed into the class of an existing down-projection: `nn.Linear`, GPT-2's `Conv1D`, a LoRA or
4-bit linear. The module's weight stays W0 under its own name. Its only new submodule is `ttt`, which holds
the new parameters.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import InPlaceTTTError
from ..families import features
from ..layout import ChunkLayout
from ..ops import fast_weight, form_of, keeping_row_norms, state_dtype, takes_weight
from ..ops.scan import fast_weight_across_ranks
from .cache import stream_of
from .forward_context import ForwardContext
from .gradient_stream import GradientStream
from .graph_ops import Decoder, decode
from .hooks import LayerCall, LayerHooks
from .quantized import is_encoded
from .settings import LayerSettings, check_split, check_width
from .target import TargetGenerator


class FastWeight(nn.Module):
    """Mixin for the class of a linear map. It adds the fast weight to the forward.

    Attributes:
        ttt: the new parameters.
        fast: the layer's index and settings.
        hooks: the hooks that pass the context of each forward to the layer.
    """

    ttt: TargetGenerator  # a GradientTarget with `target: gradient`
    fast: LayerSettings
    hooks: LayerHooks

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (plain_class(self),), self.__dict__  # pickle would look the class up by its name

    def forward(self, z: Tensor) -> Tensor:
        """Returns the layer's output [B, T, d] for z [B, T, h].

        In families whose MLPs flatten the batch, the shapes are [B T, h] and [B T, d].
        """
        if torch.compiler.is_compiling():
            call = self.hooks.unclaimed
            if call is not None and call.decoder is not None:
                return self._decode_in_graph(z, call.decoder)
            if self._has_norms or (call is not None and call.cache is not None):
                return self._forward_outside_of_graphs(z)
        return self._forward(z)

    def _decode_in_graph(self, z: Tensor, decoder: Decoder) -> Tensor:
        """Does the same as `_forward` for single tokens and a static cache, by an operator."""
        call = self.hooks.claim(z)
        assert call is not None
        context = call.context
        flat = super().forward(z)
        out, z = (tensor.reshape(*context.shape, -1) for tensor in (flat, z))
        decode(out, z, self._source(call), context.rows_read(), decoder.number, context.generated)
        return out.reshape(flat.shape)

    @torch.compiler.disable(
        reason="reads into a cache, and norms of writes or rows, run outside of the graph"
    )
    def _forward_outside_of_graphs(self, z: Tensor) -> Tensor:
        return self._forward(z)

    def _forward(self, z: Tensor) -> Tensor:
        call = self.hooks.claim(z)
        if call is None:
            return super().forward(z)
        out = self._read(z.reshape(*call.context.shape, -1), self._source(call), call)
        return out.reshape(*z.shape[:-1], -1)

    def _read(self, z: Tensor, x: Tensor, call: LayerCall) -> Tensor:
        context = call.context
        if z.shape[-1] != features(self)[0]:
            check_split(self.fast.config)
        if call.cache is None:
            return self._read_whole(z, x, context)
        if context.group is not None:
            raise InPlaceTTTError(
                "a cache cannot be shared by the ranks of a sequence; pass use_cache=False."
            )
        stream = stream_of(call.cache, self.fast.layer, z.shape[0], self.fast.config)
        if isinstance(stream, GradientStream):
            ids, positions = context.tokens()
            return stream.take(
                super().forward(z), self.keys(z), ids, positions, context.spans(), self, self.fast.layer
            )
        if not self._needs_gradient(z, x):
            if stream.decoder is None:
                stream.decoder = Decoder(stream, self)
            return stream.advance(
                super().forward(z), self.keys(z), x, context.spans(), self, generated=context.generated
            )
        context.spans()  # raises for packed rows: with a cache, attention sees one document per row
        stream.abandon()
        return self._read_whole(z, x, context)

    def _source(self, call: LayerCall) -> Tensor:
        """Returns the target source X [B, T, d]. With `target: gradient` these are embeddings, not used."""
        if self.training and call.context.with_gradient and not torch.is_grad_enabled():
            raise InPlaceTTTError(
                "gradient checkpointing with use_reentrant=True loses the gradient of the targets; enable "
                "it with "
                'gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
        x = call.context.embeddings if self.fast.config.target != "hidden_states" else call.mlp_input
        assert x is not None
        x = x.reshape(*call.context.shape, -1)
        check_width(self.fast, x.shape[-1], features(self)[1])
        return x.detach() if self.fast.config.detach_target else x

    def _read_whole(self, z: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
        if not (self.training or context.layout(self.chunk_size).writes()):
            return super().forward(z)
        v, w0 = self._targets(x, context), self.matrix()
        if (
            self.ttt.keys is None
            and self.fast.config.rule.reads_state
            and w0 is not None
            and w0.dtype == z.dtype == v.dtype
            and takes_weight(z)
        ):
            out = self._fast(z, v, w0, context)
            bias = getattr(self, "bias", None)
            return out if bias is None else out + bias
        base = super().forward(z)
        return base + self._fast(self.keys(z), v.to(z.dtype), None, context).to(base.dtype)

    def _targets(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Returns the targets [B, T, d] of a forward of whole rows.

        With `target: gradient` they are loss gradients, found in the context.
        """
        if self.fast.config.target != "gradient":
            return self.ttt(x, context.part(self.chunk_size))
        if context.targets is None:
            raise InPlaceTTTError(
                "the class of the base model finds the loss gradients, but something replaced that class; "
                "undo that."
            )
        return context.targets[self.fast.layer].to(x.dtype)

    def keys(self, z: Tensor) -> Tensor:
        """Returns the keys that the layer reads and writes with.

        Args:
            z: the layer's input [..., h].

        Returns:
            z itself (the paper), or the whitened keys [..., r].
        """
        return z if self.ttt.keys is None else self.ttt.keys(z)

    def targets(self, gradient: Tensor) -> Tensor:
        """Returns the targets V [..., d], with `target: gradient`.

        Args:
            gradient: the loss gradient at the layer's output [..., d].
        """
        target: Any = self.ttt
        return target.targets(gradient)

    def gate(self, keys: Tensor) -> Tensor | None:
        """Returns the weight [...] of each key's write, or None without a write gate.

        Args:
            keys: keys [..., r].
        """
        return None if self.ttt.write_gate is None else self.ttt.write_gate(keys)

    def _fast(self, z: Tensor, v: Tensor, w0: Tensor | None, context: ForwardContext) -> Tensor:
        gate = self.gate(z)
        if self.fast.observer is not None:
            self.fast.observer(self, z, v, gate, context)
        settings = {**self._settings(), "gate": gate, "layout": context.layout(self.chunk_size)}
        if context.group is None:
            return fast_weight(z, v, w0, **settings)
        return fast_weight_across_ranks(z, v, w0, group=context.group, **settings)

    def _settings(self) -> dict[str, Any]:
        """Returns the op's arguments that depend on the layer alone."""
        return {
            "eta": self.eta,
            "clip": self.tau(),
            "rule": self.fast.config.rule,
            "keep_norms_of": self._rows_to_keep(),
        }

    @property
    def _has_norms(self) -> bool:
        return self.fast.config.write_norm is not None or self.fast.config.preserve_row_norms

    def _rows_to_keep(self) -> Tensor | None:
        """Returns W0 [d, h] if its row norms are kept, else None."""
        return self.base_weight() if self.fast.config.preserve_row_norms else None

    def base_weight(self) -> Tensor:
        """Returns W0 [d, h].

        Raises:
            InPlaceTTTError: if the module does not show W0 (see `matrix`).
        """
        w0 = self.matrix()
        if w0 is None:
            raise InPlaceTTTError(
                f"preserve_row_norms and prompt_write need W0, which {type(self).__name__} does not show; "
                "leave them out, or load W0 as a plain linear map, not quantized and not wrapped."
            )
        return w0

    def readout(self, state: Tensor) -> Tensor:
        """Returns the matrix [..., d, r] that keys are multiplied with. In the paper it is S itself.

        Args:
            state: states [..., ·, r].
        """
        w0, rule = self._rows_to_keep(), self.fast.config.rule
        return (
            form_of(rule).readout(state, rule)
            if w0 is None
            else keeping_row_norms(state, w0.detach().to(state.dtype), self.eta)
        )

    def _needs_gradient(self, z: Tensor, x: Tensor) -> bool:
        return torch.is_grad_enabled() and (
            z.requires_grad or x.requires_grad or any(p.requires_grad for p in self.parameters())
        )

    def matrix(self) -> Tensor | None:
        """Returns W0 [d, h] of a plain linear map; None for a quantized or wrapped one."""
        return None

    @property
    def chunk_size(self) -> int:
        return self.fast.config.chunk_size

    @property
    def eta(self) -> float:
        return self.fast.eta

    def tau(self) -> float | Tensor | None:
        """Returns the clip's bound on the norm of a chunk's write, or None if this mode does not clip."""
        clip = self.fast.config.clip
        if clip is None or (self.training and clip.mode == "inference"):
            return None
        return clip.max_norm * self.w0_norm() if clip.relative else clip.max_norm

    def w0_norm(self) -> Tensor:
        """Returns ‖W0‖ (Frobenius) for a relative clip, in the dtype of states.

        Raises:
            InPlaceTTTError: if the module does not show W0 (see `matrix`).
        """
        w0 = self.matrix()
        if w0 is None:
            raise InPlaceTTTError(
                f"a relative clip needs ‖W0‖, which {type(self).__name__} does not show; use an absolute tau."
            )
        return torch.linalg.vector_norm(w0.detach(), dtype=state_dtype(w0.dtype))

    def write(
        self, z: Tensor, x: Tensor, layout: ChunkLayout, state: Tensor | None, *, reads: bool
    ) -> tuple[Tensor, Tensor]:
        """Reads and writes the complete chunks of `layout`.

        Args:
            z: keys [B, T, r].
            x: target source [B, T, d].
            layout: the documents and their chunks.
            state: states [B, ·, r] before the first chunk; None for zero.
            reads: True if the reads are needed. If False, the returned reads may leave out `state`.

        Returns:
            The reads of the keys, times η, [B, T, d], and the states [B, ·, r] after the complete chunks.
        """
        return self.write_targets(z, self.ttt(x, layout).to(z.dtype), layout, state, reads=reads)

    def write_targets(
        self, z: Tensor, v: Tensor, layout: ChunkLayout, state: Tensor | None, *, reads: bool
    ) -> tuple[Tensor, Tensor]:
        """Does the same as `write`, from targets v [B, T, d] in place of a target source."""
        known = state if reads else None  # the state is a sum, so the old part can be added afterwards
        read = {"layout": layout, "initial_state": known, "gate": self.gate(z), **self._settings()}
        out, after = fast_weight(z, v, None, return_state=True, **read)
        return out, after if state is None or state is known else state + after


class FastWeightLinear(FastWeight, nn.Linear):
    """A fast-weight `nn.Linear`."""

    def matrix(self) -> Tensor | None:
        return None if is_encoded(self.weight) else self.weight


class FastWeightConv1D(FastWeight, Conv1D):
    """A fast-weight `Conv1D`. Its weight has shape [h, d]."""

    weight: nn.Parameter

    def matrix(self) -> Tensor | None:
        return self.weight.T


_OF_PLAIN: dict[type, type[FastWeight]] = {nn.Linear: FastWeightLinear, Conv1D: FastWeightConv1D}


@functools.cache
def fast_class(plain: type) -> type[FastWeight]:
    """Returns the fast-weight class of a linear map's class.

    A module can only change to a class with the same layout of instances. The first base class determines
    that layout.
    """
    layout = type("Layout", (plain.__base__,), {})  # type: ignore[arg-type]
    return _OF_PLAIN.get(plain) or type(
        f"FastWeight{plain.__name__}", (layout, FastWeight, plain), {"__module__": __name__}
    )


def _empty(plain: type) -> Any:
    made = fast_class(plain)
    return made.__new__(made)


def plain_class(down: FastWeight) -> type:
    """Returns the down-projection's class without `FastWeight`."""
    classes = type(down).__mro__
    return classes[classes.index(FastWeight) + 1]
