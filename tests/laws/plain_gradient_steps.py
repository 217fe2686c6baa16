"""Plain gradient steps by autograd, which reading with `target: gradient` must equal."""

import copy
from typing import Any

import torch
from families import build
from models import RIDGE, random_ids
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from inplace_ttt import (
    InPlaceTTTConfig,
    calibrate,
    convert,
)
from inplace_ttt.families import CACHE, locate
from inplace_ttt.rules import RidgeRule
from inplace_ttt.surgery import config_of, fast_weights

LAYERS, CHUNK, LENGTH = (0, 2), 7, 40
SUM: dict[str, Any] = {"eta": 0.3}
SOLVED = {"update_rule": "ridge", "ridge": 0.5, "whitening": RIDGE["whitening"], "eta": 0.3}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.05}


def reading(
    name: str, dtype: torch.dtype = torch.float64, **config: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A family, and its conversion."""
    base = build(name).to(dtype).eval()
    settings = {"layers": LAYERS, "chunk_size": CHUNK, "target": "gradient", **(config or SUM)}
    model = convert(copy.deepcopy(base), InPlaceTTTConfig(**settings))
    calibrate(model, [random_ids(1, 64, seed=2)])
    return base, model


def plain_steps(base: PreTrainedModel, model: PreTrainedModel, ids: Tensor, *, graph: bool = False) -> Tensor:
    """Logits [1, T, V] by autograd: a chunk is read with W0 + ηM, then its loss moves the sums that M is made
    of.

    graph: logits keep their graph, through the keys and the KV cache; the targets are constants.
    """
    ttt, cache, logits = fast_weights(model), DynamicCache(config=base.config.get_text_config()), []
    down = {i: locate(base).layers[i].down_proj for i in ttt}
    state: dict[int, Tensor] = {}
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def read(i: int) -> Any:
        def hook(module: Any, args: tuple[Tensor], out: Tensor) -> Tensor:
            keys = ttt[i].keys(args[0])
            change = (
                torch.zeros(out.shape[-1], keys.shape[-1]).to(out)
                if i not in state
                else read_of(i, state[i]).to(out)
            )
            out = out + ttt[i].eta * keys @ change.T
            probe = torch.zeros_like(out, requires_grad=True)
            seen[i] = keys if graph else keys.detach(), probe
            return out + probe

        return hook

    def read_of(i: int, sums: Tensor) -> Tensor:
        """M of the sums; solved anew, since the rule's own code keeps no graph."""
        rule = ttt[i].fast.config.rule
        if not isinstance(rule, RidgeRule):
            return ttt[i].readout(sums)
        gram = sums[-sums.shape[1] :] + rule.ridge * torch.eye(sums.shape[1]).to(sums)
        return torch.linalg.solve(gram, sums[: -sums.shape[1]].T).T

    def step(i: int, gradient: Tensor) -> None:
        keys, values = (
            x[0].to(torch.promote_types(x.dtype, torch.float32))
            for x in (seen[i][0], -ttt[i].ttt.gain * gradient)
        )
        delta = values.T @ keys
        clip = ttt[i].tau()
        factor = 1.0 if clip is None else min(1.0, float(clip) / float(delta.norm()))
        rule = ttt[i].fast.config.rule
        step = (
            torch.cat([factor * delta, factor * keys.T @ keys])
            if isinstance(rule, RidgeRule)
            else factor * delta
        )
        state[i] = step + state.get(i, torch.zeros_like(step))

    handles = [module.register_forward_hook(read(i)) for i, module in down.items()]
    for start in range(0, ids.shape[1], CHUNK):
        chunk = ids[:, start : start + CHUNK]
        steps = config_of(model).steps_per_chunk if chunk.shape[1] == CHUNK else 0
        before = copy.deepcopy(cache) if steps > 1 else cache
        out = base(input_ids=chunk, **{CACHE: cache}, use_cache=True).logits
        logits.append(out if graph else out.detach())
        for layer in cache.layers if not graph else []:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        for number in range(steps):
            if number:
                out = base(input_ids=chunk, **{CACHE: copy.deepcopy(before)}, use_cache=True).logits
            wide = out[0, :-1].to(torch.float64 if out.dtype == torch.float64 else torch.float32)
            loss = cross_entropy(wide, chunk[0, 1:], reduction="sum")
            found = torch.autograd.grad(loss, [probe for _, probe in seen.values()], retain_graph=graph)
            for i, gradient in zip([*seen], found, strict=True):
                step(i, gradient)
    for handle in handles:
        handle.remove()
    return torch.cat(logits, 1)


@torch.no_grad()
def read_in(model: PreTrainedModel, ids: Tensor, parts: list[int]) -> Tensor:
    cache, found = DynamicCache(config=model.config.get_text_config()), []
    for part in ids.split(parts, dim=1):
        found.append(model(input_ids=part, **{CACHE: cache}).logits)
    return torch.cat(found, 1)
