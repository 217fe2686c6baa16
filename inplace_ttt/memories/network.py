"""What the memories whose state is a fast network share: the gradient at a chunk's start, token by token or
in dual form.

The gradient of one token's loss in a linear map z = W x has rank one, e xᵀ with e = ∂loss/∂z. So weights that
have taken steps c_s from W are never built to be read: W_t x = W x − Σ_{s≤t} c_s e_s ⟨x_s, x⟩, three products
for a whole chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .protocol import HeadMemory, State, Tokens, Weights, gradient

LinearMap = Callable[[Tensor], Tensor]
"""x [B, H, n, in] → [B, H, n, out]: a matrix, or in dual form a matrix for each token."""
Step = tuple[Tensor, Tensor]
"""For n tokens, the input x [B, H, n, in] of a linear map and the loss's gradient e [B, H, n, out] at its
output."""


class NetworkMemory(HeadMemory[State]):
    """A fast network `f` with learnt initial weights, and the loss of f(k) against v. Loss ‖f(k) − v‖² unless
    overridden.

    chunk: tokens whose gradients are all taken at the weights that the chunk starts from.
    """

    def __init__(
        self, dim: int, heads: int, chunk: int, shapes: Sequence[tuple[int, int]], std: float | None = None
    ) -> None:
        super().__init__(dim, heads, chunk)
        # [out, in], N(0, 1/in) unless std is given.
        self.initial = nn.ParameterList(
            nn.init.normal_(torch.empty(heads, *shape), std=std or shape[1] ** -0.5) for shape in shapes
        )

    @abstractmethod
    def f(self, maps: Sequence[LinearMap], x: Tensor) -> Tensor:
        """The network on x [B, H, n, d], whose linear maps are given."""

    def loss(self, y: Tensor, v: Tensor) -> Tensor:
        """The loss of y = f(k) against v, not yet summed."""
        return (y - v) ** 2

    def initial_weights(self, batch: int) -> Weights:
        return self.learnt(batch, *self.initial)

    def gradients(self, weights: Weights, token: Tokens) -> Weights:
        """∇ of one token's loss, by autograd. The primal form takes its steps with it."""
        return gradient(lambda w: self.loss(self.f(fixed(w), token.k), token.v), weights)

    def steps(self, weights: Weights, tokens: Tokens) -> list[Step]:
        """Every token's x and e, for each linear map, all at the same weights. The dual form takes its steps
        with them."""
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
    """The maps of weights that are the same for every token."""
    return [lambda x, w=w: x @ w.mT for w in weights]  # type: ignore[misc]


def moved(start: Tensor, steps: Tensor, scale: Tensor) -> LinearMap:
    """The map whose weight at token t is start − scale_t · steps; both [B, H, out, in], scale [n, 1]."""
    return lambda x: x @ start.mT - scale * (x @ steps.mT)


def stepped(base: LinearMap, step: Step, mix: Tensor) -> LinearMap:
    """The map whose weight at token t has taken the steps mix[t, s] of the tokens s; mix [B, H, n, n]."""
    inputs, errors = step
    return lambda x: base(x) - ((x @ inputs.mT) * mix) @ errors


def taken(step: Step, rates: Tensor) -> Tensor:
    """Σ_s rate_s e_s x_sᵀ [B, H, out, in], the sum of the steps; rates [B, H, n, 1]."""
    inputs, errors = step
    return (rates * errors).mT @ inputs


def _normal(x: Tensor) -> Tensor:
    """Autograd cannot use what was made under torch.inference_mode()."""
    return x.clone() if x.is_inference() else x
