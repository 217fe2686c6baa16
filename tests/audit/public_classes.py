"""The public implementations' own classes, executed as their authors wrote them, out of files that the
project does not hold.

Of a file of theirs only the classes asked for are run, so that what the rest of it imports need not be
installed.
"""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import einops
import opt_einsum
import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

FOLDER = Path(__file__).parents[2] / ".cache" / "public-code"
D, H, LAYER = 16, 48, 0
FAMILIES = {"qwen3": "Qwen3", "llama": "Llama"}


def classes(file: str, *names: str) -> dict[str, Any]:
    """Some classes of a file by name; the test that asks is skipped where the file is not here."""
    path = FOLDER / file
    if not path.exists():
        pytest.skip(f"{path} is not here; `python tools/fetch/get_public_code.py` fetches it from GitHub")
    wanted = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") in names]
    assert len(wanted) == len(names)
    for node in wanted:
        node.decorator_list = []  # type: ignore[attr-defined]  # of compilers and of a GPU's autocast
    space: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "logging": logging,
        "logger": logging.getLogger("public"),
    }
    space |= {
        "ACT2FN": ACT2FN,
        "GradientCheckpointingLayer": GradientCheckpointingLayer,
        "contract": opt_einsum.contract,
    }
    space |= {
        "tree_map": torch.utils._pytree.tree_map,
        "rearrange": einops.rearrange,
        "repeat": einops.repeat,
        "deprecate_kwarg": lambda *args, **kwargs: lambda function: function,
    }
    for name in FAMILIES.values():
        space |= {
            f"{name}Attention": lambda **kwargs: nn.Identity(),
            f"{name}RMSNorm": lambda *args, **kwargs: nn.Identity(),
        }
        space |= {f"{name}Config": getattr(transformers, f"{name}Config")}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *wanted], []), str(path), "exec"), space)
    return {name: space[name] for name in names}


def config(**settings: Any) -> SimpleNamespace:
    """The settings of their configs that these classes read, with the defaults of the code where none are
    given."""
    values = {
        "ttt_mode": True,
        "ttt_layers": [LAYER],
        "ttt_chunk": 8192,
        "ttt_proj": True,
        "ttt_lr": 0.3,
        **settings,
    }
    shape = {"hidden_size": D, "intermediate_size": H, "hidden_act": "silu", "mlp_bias": False}
    return SimpleNamespace(**shape, rms_norm_eps=1e-6, layer_types=["full_attention"], **values)


def public_mlp(family: str = "qwen3", inference: bool = False, **settings: Any) -> nn.Module:
    """The training or inference code's MLP."""
    torch.manual_seed(0)
    name = f"{FAMILIES[family]}MLP"
    return classes(_file(family, inference), name)[name](config(**settings), LAYER)


def public_layer(family: str = "qwen3", **settings: Any) -> nn.Module:
    """The inference code's decoder layer."""
    torch.manual_seed(0)
    name = FAMILIES[family]
    return classes(_file(family, True), f"{name}MLP", f"{name}DecoderLayer")[f"{name}DecoderLayer"](
        config(**settings), LAYER
    )


def port_gating(**settings: Any) -> nn.Module:
    """The Moshi port's gating with its fast weight laid out, as its loader does."""
    torch.manual_seed(0)
    names = ("CausalConv1D", "LMAlignedTargetGenerator", "TTTGating")
    made = classes("moshi-in-place/ttt_module.py", *names)["TTTGating"]
    gating = made(nn.functional.silu, D, 72, {"enabled": True, **settings})
    gating.w_down = nn.Parameter(gating.linear_out.weight.detach().float().clone())
    gating.w_down_pretrained.copy_(gating.w_down.detach())
    return gating


def _file(family: str, inference: bool) -> str:
    folder = {"qwen3": "hf_qwen3", "llama": "hf_llama3" if inference else "hf_llama"}[family]
    return f"in-place-ttt/{'inference_model' if inference else 'hf_models'}/{folder}/modeling_{family}.py"
