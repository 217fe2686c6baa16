"""vLLM compiles the model in pieces between attention and fast weights, as it does for CUDA graphs; and a step
of single tokens does not wait for the device.

A CPU has no graphs. A stand-in keeps what matters of them: each piece gives its results in the same tensors at
every call of a size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from vllm import EngineArgs
from vllm.compilation import backends
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms.cpu import CpuPlatform

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.serving import fast_linear
from inplace_ttt.serving.engine_settings import ADVANCE
from serving.checkpoints import save
from serving.test_tokens import GREEDY, NEW, engine, generated, prompts, served


class Replayed:
    """A piece whose results lie where those of its first call with these shapes lie."""

    made: int = 0
    """Pieces made."""
    replays: int = 0
    """Calls whose results were copied to where the first call's are."""
    recording: bool = False
    """A piece runs, as if a graph recorded it."""

    def __init__(self, piece: Callable[..., Any]) -> None:
        self.piece, self.kept = piece, dict[tuple[Any, ...], Any]()
        Replayed.made += 1

    def __call__(self, *args: Any) -> Any:
        sizes = tuple(tuple(arg.shape) if isinstance(arg, Tensor) else arg for arg in args)
        Replayed.recording = True
        try:
            results = self.piece(*args)
        finally:
            Replayed.recording = False
        if sizes not in self.kept:
            self.kept[sizes] = results
            return results
        Replayed.replays += 1
        return tree_map(
            lambda new, old: old.copy_(new) if isinstance(new, Tensor) else new, results, self.kept[sizes]
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.piece, name)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Has vLLM compile in pieces on a CPU, where it traces the model once."""
    settings = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: VllmConfig) -> None:
        settings(vllm_config)
        vllm_config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        vllm_config.compilation_config.backend = "eager"
        vllm_config.compilation_config.compile_sizes = []

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
    monkeypatch.setattr(
        backends, "wrap_with_cudagraph_if_needed", lambda piece, *args, **kwargs: Replayed(piece)
    )
    monkeypatch.setattr(fast_linear, "_is_recorded", lambda x: Replayed.recording)
    monkeypatch.setattr(Replayed, "made", 0)
    monkeypatch.setattr(Replayed, "replays", 0)


@pytest.mark.parametrize("preset", ["paper", "reference", "ridge"])
def test_replayed_pieces_give_the_same_tokens(preset: str, in_pieces: None, tmp_path: Path) -> None:
    model = save(tmp_path / "ttt", "llama", preset)
    asked = prompts(1, 31, 32, 33, 64, 70, 200)
    with engine(tmp_path / "ttt", enforce_eager=False) as made:
        compilation = made.vllm_config.compilation_config
        assert compilation.splitting_ops is not None and ADVANCE in compilation.splitting_ops
        assert served(made, asked) == {number: generated(model, ids) for number, ids in enumerate(asked)}
    assert Replayed.made > 4 and Replayed.replays > 0


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE", "NONE"])
def test_graphs_leave_the_fast_weights_out(mode: str, tmp_path: Path) -> None:
    """Whatever the user asks for."""
    save(tmp_path / "ttt", "llama", "paper")
    given = {"cudagraph_mode": mode, "splitting_ops": ["vllm::unified_attention_with_output"]}
    config = EngineArgs(str(tmp_path / "ttt"), skip_tokenizer_init=True, compilation_config=given)
    compilation = config.create_engine_config().compilation_config
    assert compilation.splitting_ops == [*given["splitting_ops"], ADVANCE]
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE  # a CPU has none


def test_recording_the_fast_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "_is_recorded", lambda x: True)
    with pytest.raises(InPlaceTTTError, match="cannot be recorded in a CUDA graph"):
        torch.ops.inplace_ttt.advance(torch.zeros(1, 4), torch.zeros(1, 8), torch.zeros(1, 4), "layer")


@pytest.mark.parametrize("preset", ["paper", "ridge"])
def test_a_decoding_step_does_not_wait(preset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of ours asks a tensor for its numbers, and one index tensor is made per step."""
    asked, made_indices, watched = prompts(1, 33, 40, 70), [], False

    def refused(name: str) -> Any:
        real = getattr(Tensor, name)

        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            assert not watched or not caller.startswith("inplace_ttt"), f"{caller} calls {name}"
            return real(self, *args, **kwargs)

        return call

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        if watched and sys._getframe(1).f_globals["__name__"].startswith("inplace_ttt"):
            made_indices.append(args)
        return real_tensor(*args, **kwargs)

    model, real_tensor = save(tmp_path / "ttt", "llama", preset), torch.tensor
    for name in ("tolist", "item", "cpu", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(Tensor, name, refused(name))
    monkeypatch.setattr(torch, "tensor", tensor)
    with engine(tmp_path / "ttt", enable_prefix_caching=False) as made:
        for number, prompt in enumerate(asked):
            made.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
        said: dict[int, list[int]] = {}
        for step in range(NEW):
            watched = 2 <= step < 20  # no chunk is completed in these
            for output in made.step():
                said[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert said == {number: generated(model, prompt) for number, prompt in enumerate(asked)}
    assert len(made_indices) == 18
