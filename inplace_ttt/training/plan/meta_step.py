"""Measures memory and operations of one micro-step and one evaluation batch, by runs on the meta device."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import AttentionInterface

from ...surgery import causal_lm, disable_ttt
from ..loop.held_out import held_out_sums
from ..model import meta_model
from ..recipe.recipe import Recipe
from .flops import tokens_of

_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
"""Matrix products, each with the position of its left factor among the arguments.

torch's FlopCounterMode leaves out in-place products, which are a fifth of all products.
"""


@dataclass(frozen=True)
class StepCost:
    """Cost of one device's micro-step, forward and backward. The weights are left out.

    Attributes:
        activations: bytes at the peak, without the gradients of parameters.
        step: bytes at the peak, with these gradients.
        logits: bytes of tensors as wide as the vocabulary, at the peak of `activations`.
        product_flops: operations of the matrix products, and of solves.
    """

    activations: int
    step: int
    logits: int
    product_flops: int


def step_cost(recipe: Recipe) -> StepCost:
    """Returns the cost of one micro-step, measured on the meta device."""
    model = _on_meta(recipe).train()
    lm = causal_lm(model)
    if recipe.training.gradient_checkpointing:
        # Older transformers have the second name.
        enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    meter = _Meter(model, lm.config.get_text_config().vocab_size, tokens_of(recipe))
    with torch.device("meta"), meter:
        ids, mask = _inputs(recipe)
        _loss(lm, ids, mask, recipe).backward()
    return StepCost(meter.peak_activations, meter.peak, meter.peak_logits, meter.flops)


def evaluation_cost(recipe: Recipe) -> int:
    """Returns the peak bytes, without weights, of a batch of held-out rows, measured on the meta device."""
    model = _on_meta(recipe).eval()
    meter = _Meter(model, model.config.get_text_config().vocab_size, tokens_of(recipe))
    with torch.device("meta"), meter:
        ids, mask = _inputs(recipe)
        held_out_sums(model, {"input_ids": ids, "attention_mask": mask}, torch.zeros_like(ids))
    return meter.peak


def _on_meta(recipe: Recipe) -> PreTrainedModel:
    """Returns the recipe's model on the meta device.

    Its attention and experts are replaced by versions that keep the same tensors as the real ones do.
    """
    model = meta_model(recipe)
    causal_lm(model).config.get_text_config()._experts_implementation = _EXPERTS
    if recipe.model.attn_implementation != "eager":
        causal_lm(model).config._attn_implementation = _NAMES[recipe.model.attn_implementation]
    return model


def _inputs(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Returns the token ids [B, T] and mask of one device's micro-batch.

    With packed rows sdpa keeps a mask of the whole row, even if ranks share it. Flash attention needs none.
    """
    length = recipe.data.sequence_length // recipe.parallel.sequence_parallel_size
    ids = torch.zeros(recipe.training.batch_size, length, dtype=torch.long)
    seen = {"flash_attention_2": 1, "sdpa": recipe.data.sequence_length, "eager": length}[
        recipe.model.attn_implementation
    ]
    return ids, torch.zeros(len(ids), 1, seen, seen, dtype=torch.bool)


def _loss(model: PreTrainedModel, ids: Tensor, mask: Tensor, recipe: Recipe) -> Tensor:
    """Returns the loss as the Trainer computes it. Liger's loss never holds all logits."""
    if not recipe.training.liger:
        teacher = None
        if recipe.training.distillation is not None:
            with torch.no_grad(), disable_ttt(model):
                teacher = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = torch.ones((), dtype=torch.long)
        outputs = model(
            input_ids=ids, attention_mask=mask, labels=ids, use_cache=False, num_items_in_batch=targets
        )
        if teacher is None:
            return outputs.loss
        student, wanted = (logits.float().log_softmax(-1) for logits in (outputs.logits, teacher))
        return outputs.loss + kl_div(student, wanted, log_target=True, reduction="sum")
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return _FusedLoss.apply(hidden.flatten(0, 1), model.get_output_embeddings().weight)


class _FusedLoss(torch.autograd.Function):
    """Liger's fused linear map and cross-entropy, slice by slice, with gradients made in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        slices = max(1, weight.shape[0] // hidden.shape[1])
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for piece in hidden.chunk(slices):
            logits = piece @ weight.T
            d_logits = logits.float().to(hidden.dtype)
            d_hidden[: len(piece)] = d_logits @ weight
            d_weight += d_logits.T @ piece
        ctx.save_for_backward(d_hidden, d_weight)
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden, d_weight


class _Attention(torch.autograd.Function):
    """Fused attention, which keeps q, k, v, the output, and one number per query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        # torch converts the booleans to numbers, and keeps those
        bias = None if mask is None else mask.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32), bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


def _flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    return _Attention.apply(query, key, value, None).transpose(1, 2), None


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    repeats = getattr(module, "num_key_value_groups", 1)  # transformers repeats the heads if there is a mask
    return _Attention.apply(query, repeat_kv(key, repeats), repeat_kv(value, repeats), mask).transpose(
        1, 2
    ), None


_NAMES = {"flash_attention_2": "inplace_ttt_meta_flash", "sdpa": "inplace_ttt_meta_sdpa"}
AttentionInterface.register(_NAMES["flash_attention_2"], _flash)
AttentionInterface.register(_NAMES["sdpa"], _sdpa)


def _experts(experts: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Returns the outputs of k experts per token [N, d]. One expert's weights suffice to count sizes."""

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        return rows @ (weights[0] if experts.is_transposed else weights[0].T)

    rows = hidden.repeat_interleave(chosen.shape[-1], 0)
    inner = (
        experts._apply_gate(product(rows, experts.gate_up_proj))
        if experts.has_gate
        else experts.act_fn(product(rows, experts.up_proj))
    )
    out = product(inner, experts.down_proj) * scores.reshape(-1, 1)
    return out.view(*chosen.shape, -1).sum(1).to(hidden.dtype)


_EXPERTS = "inplace_ttt_meta_experts"
ExpertsInterface.register(_EXPERTS, _experts)


class _Meter(TorchDispatchMode):
    """Counts the live bytes since its creation, and the operations of matrix products and solves."""

    def __init__(self, model: nn.Module, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.vocabulary, self.tokens = vocabulary, tokens
        self.live = {"activations": 0, "gradients": 0, "logits": 0}
        self.peak = self.peak_activations = self.peak_logits = self.flops = 0
        self.known: dict[int, str] = {}  # kind of each live storage
        for tensor in (*model.parameters(), *model.buffers()):
            self._watch(tensor, "weights")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._is_gradient)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            self.flops += 2 * out.numel() * args[_PRODUCTS[name]].shape[-1]
        elif name == "linalg_solve_triangular":
            self.flops += out.numel() * args[0].shape[-1]
        elif name == "linalg_cholesky_ex":
            self.flops += out[0].numel() * out[0].shape[-1] // 3
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self.known:
                wide = (
                    tensor.dim() > 1
                    and tensor.shape[-1] == self.vocabulary
                    and tensor.numel() > self.vocabulary * self.tokens // 2
                )
                self._watch(tensor, "logits" if wide else "activations")
        return out

    def _watch(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self.known:
            return
        self.known[key] = kind
        weakref.finalize(storage, self._freed, key, size).atexit = False
        self._add(kind, size)

    def _freed(self, key: int, size: int) -> None:
        self._add(self.known.pop(key), -size)

    def _is_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        kind = self.known.get(id(storage))
        if kind in ("activations", "logits"):
            self.known[id(storage)] = "gradients"
            self._add(kind, -storage.nbytes())
            self._add("gradients", storage.nbytes())

    def _add(self, kind: str, size: int) -> None:
        if kind == "weights":
            return
        self.live[kind] += size
        activations = self.live["activations"] + self.live["logits"]
        if activations > self.peak_activations:
            self.peak_activations, self.peak_logits = activations, self.live["logits"]
        self.peak = max(self.peak, activations + self.live["gradients"])
