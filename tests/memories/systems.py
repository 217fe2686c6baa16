"""The memories that the law tests run over, made so that every parameter matters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from inplace_ttt.memories import Memory, make

DIM, CHUNK = 8, 5

# row -> the system's name and options
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear-attention": ("linear-attention", {"heads": 2, "chunk": 4}),
    "gla": ("gla", {"heads": 2, "chunk": 4}),
    "deltanet": ("deltanet", {"heads": 2, "chunk": 4}),
    "ttt-linear": ("ttt-linear", {"heads": 2, "mini_batch": CHUNK}),
    "ttt-linear, one head, bare": (
        "ttt-linear",
        {"mini_batch": CHUNK, "learned_rate": False, "residual_norm": False, "eta_base": 0.05},
    ),
    "ttt-linear, public form": (
        "ttt-linear",
        {"heads": 2, "mini_batch": CHUNK, "eta_base": 4.0, "form": "public"},
    ),
    "ttt-mlp": ("ttt-mlp", {"heads": 2, "mini_batch": CHUNK}),
    "ttt-mlp, public form": ("ttt-mlp", {"heads": 2, "mini_batch": CHUNK, "form": "public"}),
    "lact": ("lact", {"heads": 2, "chunk": CHUNK}),
    "lact, public Muon": ("lact", {"heads": 2, "chunk": CHUNK, "muon": "public"}),
    "titans, one layer": ("titans", {"layers": 1, "chunk": CHUNK}),
    "titans": ("titans", {"heads": 2, "chunk": CHUNK, "alpha": 0.1, "theta": 0.1}),
    "titans, data-dependent": ("titans", {"heads": 2, "chunk": CHUNK, "data_dependent": True}),
    "in-place": ("in-place", {"hidden": 12, "chunk": CHUNK}),
    "in-place, causal": ("in-place", {"hidden": 12, "chunk": CHUNK, "conv": "causal", "eta": 0.3}),
}


def system(row: str, dtype: torch.dtype = torch.float64) -> Memory[Any]:
    """One row of the table, with random parameters in place of its start values."""
    name, options = SYSTEMS[row]
    memory = make(name, DIM, **options).to(dtype)
    randomize(memory)
    return memory


@torch.no_grad()
def randomize(module: nn.Module, std: float = 0.4) -> None:
    g = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=g, dtype=torch.float64) * std)


def inputs(length: int, batch: int = 3, dtype: torch.dtype = torch.float64, seed: int = 4) -> Tensor:
    return torch.randn(
        batch, length, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def leaves(state: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor)]
