"""vLLM compiles the model in pieces between attention and fast weights, as it does for CUDA graphs; and a step
of single tokens does not wait for the device.

A CPU has no graphs. Two stand-ins keep what matters of them: each piece gives its results in the same tensors
at every call of a size; and a step of single tokens runs with the index tensors of another step.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
from inplace_ttt.serving.slots import Slots
from inplace_ttt.serving.steps import StepBuilder
from inplace_ttt.serving.tokens import SingleTokens, StepTokens, Tokens
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


@pytest.mark.parametrize("preset", ["paper", "reference", "ridge"])
def test_a_replayed_step_gives_the_same_tokens(
    preset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a graph does: a step of single tokens runs with the tensors of the first one, for a batch of a
    larger size."""
    build, advance, recorded = StepBuilder.build, Slots.advance, dict[int, StepTokens]()
    addresses = dict[tuple[int, int], tuple[int, ...]]()

    def replayed(self: StepBuilder, prefix: int, common: Any, fast_build: bool = False) -> Any:
        step = build(self, prefix, common, fast_build)
        if not step.tokens.alone:
            return step
        total, single = common.num_actual_tokens, [*step.tokens.single.index.T.tolist()]
        if total not in recorded:
            recorded[total] = self.build_for_cudagraph_capture(common).tokens
            self.single.put([tuple(one) for one in single[:total]])
        return dataclasses.replace(step, tokens=recorded[total])

    def padded(self: Slots, out: Tensor, z: Tensor, x: Tensor, tokens: StepTokens, layer: Any) -> None:
        if not tokens.alone:
            return advance(self, out, z, x, tokens, layer)
        assert self._state._read is not None
        used = (tokens.single.index, self._state._read, *self._open.held)
        here = tuple(tensor.data_ptr() for tensor in used)
        assert addresses.setdefault((id(self), len(out)), here) == here
        # slot 0 is zero, so of numbers it stores nothing that is read
        more = [torch.cat([given, given.new_full((3, given.shape[1]), 7.0)]) for given in (out, z, x)]
        advance(self, *more, tokens, layer)
        assert torch.equal(more[0][len(out) :], torch.full_like(more[0][len(out) :], 7.0))
        out.copy_(more[0][: len(out)])
        return None

    monkeypatch.setattr(StepBuilder, "build", replayed)
    monkeypatch.setattr(Slots, "advance", padded)
    model = save(tmp_path / "ttt", "llama", preset)
    asked = prompts(1, 31, 32, 33, 64, 70, 200)
    with engine(tmp_path / "ttt", max_num_seqs=12) as made:
        expected = {number: generated(model, ids) for number, ids in enumerate(asked)}
        for name in ("first", "again"):  # again from cached prefixes
            assert served(made, asked, name=name) == expected
    assert len(recorded) > 1


def test_vllm_may_record_steps_of_single_tokens(tmp_path: Path) -> None:
    """A graph of mixed requests is refused by vLLM itself, which then takes the other two kinds."""
    save(tmp_path / "ttt", "llama", "paper")
    config = EngineArgs(str(tmp_path / "ttt"), skip_tokenizer_init=True).create_engine_config()
    support = StepBuilder.get_cudagraph_support(config, None)
    for asked, resolved in (
        ("FULL", "FULL_AND_PIECEWISE"),
        ("FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"),
        ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
        ("PIECEWISE", "PIECEWISE"),
    ):
        compilation = copy.deepcopy(config.compilation_config)
        compilation.cudagraph_mode = CUDAGraphMode[asked]
        compilation.mode = CompilationMode.VLLM_COMPILE
        compilation.splitting_ops = [*compilation._attention_ops]
        found = compilation.resolve_cudagraph_mode_and_sizes(support, "INPLACE_TTT")
        assert found == CUDAGraphMode[resolved]


def test_splitting_operators_of_the_user_are_kept(tmp_path: Path) -> None:
    save(tmp_path / "ttt", "llama", "paper")
    given = {"splitting_ops": ["vllm::unified_attention_with_output"]}
    config = EngineArgs(str(tmp_path / "ttt"), skip_tokenizer_init=True, compilation_config=given)
    compilation = config.create_engine_config().compilation_config
    assert compilation.splitting_ops == [*given["splitting_ops"], ADVANCE]


def test_recording_longer_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = StepTokens(SingleTokens(2, torch.device("cpu")), (Tokens(1, 0, 0, 2),), alone=False)
    layer = SimpleNamespace(handle=SimpleNamespace(name="slots"))
    context = SimpleNamespace(
        attn_metadata={"slots": SimpleNamespace(tokens=tokens)}, no_compile_layers={"layer": layer}
    )
    monkeypatch.setattr(fast_linear, "get_forward_context", lambda: context)
    monkeypatch.setattr(fast_linear, "_is_recorded", lambda x: True)
    with pytest.raises(InPlaceTTTError, match="only in steps of one token per request"):
        torch.ops.inplace_ttt.advance(torch.zeros(2, 4), torch.zeros(2, 8), torch.zeros(2, 4), "layer")


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
