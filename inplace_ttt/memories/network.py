"""The base class of memories whose state is a fast network, in primal and in dual form.

Gradients are taken at the weights of a chunk's start. For a linear map z = W x, the gradient of one token's
loss has rank one: it is e xᵀ with e = ∂loss/∂z. Let W_t be W after steps of size c_s. The dual form reads W_t
without computing it, as W_t x = W x − Σ_{s≤t} c_s e_s ⟨x_s, x⟩. A full chunk needs three products.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .protocol import HeadMemory, State, Tokens, Weights, gradient

LinearMap = Callable[[Tensor], Tensor]
"""A function from x [B, H, n, in] to [B, H, n, out]. It applies one matrix, or (dual) one per token."""
Step = tuple[Tensor, Tensor]
"""The input x [B, H, n, in] of a linear map, and the loss's gradient e [B, H, n, out] at its output."""


class NetworkMemory(HeadMemory[State]):
    """A fast network `f` with learned initial weights, and the loss of f(k) against v.

    The loss is ‖f(k) − v‖² unless overridden.

    Args:
        dim: Width of the tokens.
        heads: Heads H; dim is a multiple of it.
        chunk: Tokens whose gradients are all taken at the weights of the chunk's start.
        shapes: (out, in) of each linear map of f.
        std: Standard deviation of the initial weights; None: 1/√in.
    """

    def __init__(
        self, dim: int, heads: int, chunk: int, shapes: Sequence[tuple[int, int]], std: float | None = None
    ) -> None:
        super().__init__(dim, heads, chunk)
        # [H, out, in], N(0, 1/in) unless std is given
        self.initial = nn.ParameterList(
            nn.init.normal_(torch.empty(heads, *shape), std=std or shape[1] ** -0.5) for shape in shapes
        )

    @abstractmethod
    def f(self, maps: Sequence[LinearMap], x: Tensor) -> Tensor:
        """Applies the network, whose linear maps are given, to x [B, H, n, d]."""

    def loss(self, y: Tensor, v: Tensor) -> Tensor:
        """Returns the loss of y = f(k) against v, not yet summed."""
        return (y - v) ** 2

    def initial_weights(self, batch: int) -> Weights:
        return self.learned(batch, *self.initial)

    def gradients(self, weights: Weights, token: Tokens) -> Weights:
        """Returns the gradient of one token's loss, by autograd. The primal form steps along it."""
        return gradient(lambda w: self.loss(self.f(fixed(w), token.k), token.v), weights)

    def steps(self, weights: Weights, tokens: Tokens) -> list[Step]:
        """Returns every token's x and e for each linear map, all at the same weights.

        The dual form computes its steps from x and e.
        """
        differentiable = torch.is_grad_enabled()
        inputs, outputs = [], []

        def recorded(weight: Tensor) -> LinearMap:
            def apply(x: Tensor) -> Tensor:
                z = x @ weight.mT
                inputs.append(x)
                outputs.append(z if z.requires_grad else z.requires_grad_())
                return outputs[-1]

            return apply

        with torch.inference_mode(False), torch.enable_grad():
            k, v, weights = _normal(tokens.k), _normal(tokens.v), tuple(map(_normal, weights))
            loss = self.loss(self.f([recorded(w) for w in weights], k), v).sum()
            errors = torch.autograd.grad(loss, outputs, create_graph=differentiable)
        return list(zip(inputs, errors, strict=True))


def fixed(weights: Weights) -> list[LinearMap]:
    """Returns the maps of weights that are the same for every token."""
    return [lambda x, w=w: x @ w.mT for w in weights]  # type: ignore[misc]


def moved(start: Tensor, steps: Tensor, scale: Tensor) -> LinearMap:
    """Returns the map whose weight at token t is start − scale_t · steps.

    start and steps are [B, H, out, in], scale is [n, 1].
    """
    return lambda x: x @ start.mT - scale * (x @ steps.mT)


def stepped(base: LinearMap, step: Step, mix: Tensor) -> LinearMap:
    """Returns the map whose weight at token t is the base's after the steps mix[t, s] e_s x_sᵀ of all tokens
    s.

    mix is [B, H, n, n].
    """
    inputs, errors = step
    return lambda x: base(x) - ((x @ inputs.mT) * mix) @ errors


def taken(step: Step, rates: Tensor) -> Tensor:
    """Returns Σ_s rate_s e_s x_sᵀ [B, H, out, in], the sum of the steps; rates [B, H, n, 1]."""
    inputs, errors = step
    return (rates * errors).mT @ inputs


def _normal(x: Tensor) -> Tensor:
    """Returns x, or a copy of x if it was made under torch.inference_mode(), since autograd cannot use it."""
    return x.clone() if x.is_inference() else x
