"""Compares the write at a prompt's end (`prompt_write`) with the ridge regression that the model declares.

The regression is computed independently, in float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..config_tables import PromptWrite
from ..layer.overrides import with_config
from ..session.session import Session
from .declared_rule import DeclaredRule
from .probed import Probed
from .recorded_errors import base_output
from .recording import Piece


def prompt_deviations(lm: Any, settings: PromptWrite, seed: int) -> dict[str, dict[int, float]]:
    """Returns the error of the reads after two written prompts, relative to their size, by reading and layer.

    The window is shorter than the prompt. In one reading η determines the size of the write, in the other the
    cap does.

    Args:
        lm: a converted model.
        settings: the `prompt_write` of the model.
        seed: seed of the token ids.
    """
    found: dict[str, dict[int, float]] = {}
    with Probed.of(lm, seed) as probed:
        window, n = 2 * probed.chunk, 3 * probed.chunk + 3
        prompt, later = probed.ids(2, n + probed.chunk).split([n, probed.chunk], 1)
        for name, eta, cap in (("a written prompt", 0.3, None), ("a written prompt, capped", 1e3, 0.3)):
            own = dataclasses.replace(settings, window=window, eta=eta, cap=cap)
            with (
                with_config(probed.layers.values(), prompt_write=own),
                probed.recording() as record,
            ):
                state = Session(lm)
                state.write_prompt(prompt)
                state.read(later)
            found[name] = {}
            for index, layer in probed.layers.items():
                off = size = 0.0
                for row in range(2):
                    z, x, _, _ = record.of(index, [Piece(0, row, 0, n - 1), Piece(1, row, 0, 1)])
                    after, _, out, _ = record.of(index, [Piece(2, row, 0, 1 + probed.chunk)])
                    reads = after @ _change(z, x, probed.rule(index), own).T
                    off += float((out - base_output(layer, after) - reads).square().sum())
                    size += float(reads.square().sum())
                found[name][index] = (off / size) ** 0.5
    return found


def _change(z: Tensor, x: Tensor, rule: DeclaredRule, settings: PromptWrite) -> Tensor:
    """Returns the declared change of W0 [d, h] after a prompt with keys z [n, h], target source x [n, d]."""
    w0, x = rule.tensors["w0"], rule.normalize_targets(x)
    k, v = z[:-1][-settings.window :], (x[1:] @ rule.tensors["proj"])[-settings.window :]
    gram = k @ k.T + settings.ridge * torch.eye(len(k), dtype=k.dtype)
    change = torch.linalg.solve(gram, v - k @ w0.T).T @ k
    most = float("inf") if settings.cap is None else settings.cap * float(w0.norm() / change.norm())
    moved = w0 + min(settings.eta, most) * change
    if settings.preserve_row_norms:
        moved = moved * (w0.norm(dim=1) / moved.norm(dim=1))[:, None]
    return moved - w0
